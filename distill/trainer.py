"""The training loop: any objective, resumable to the exact step.

The batch, everything random and the learning rate are functions of the step (the rate of `plateau` also of the losses,
which the state keeps), so a run that was killed continues from its last saved state as if it had never stopped.
accelerate places the model and shares the work among processes.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from linearize.convert.errors import ConversionError
from linearize.distill.data import TokenBlocks
from linearize.distill.progress import meter
from linearize.distill.schedules import RateSchedule, Schedule


class NonFiniteLoss(ConversionError):
    """Training met a loss that is NaN or infinite; the last good state is on disk."""


@dataclass(frozen=True)
class LoopConfig:
    """How long and how fast to train.

    Attributes:
        batch_size: sequences per step, all processes together.
        schedule, warmup, final_rate: see `RateSchedule`.
        clip: largest norm of the gradient of all groups together.
        save_every: steps between saved states; 0 for about ten in all.
    """

    steps: int
    batch_size: int
    seed: int
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    final_rate: float = 0.05
    clip: float = 1.0
    save_every: int = 0


@dataclass
class TrainingLog:
    """What a stage did. Losses are one per step."""

    losses: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    resumed_at: int = 0


def train(
    name: str,
    objective: nn.Module,
    groups: list[dict],
    data: TokenBlocks,
    config: LoopConfig,
    state_file: Path,
    accelerator: Accelerator | None = None,
) -> TrainingLog:
    """Minimise `objective(input_ids)` (a scalar) over the tensors in `groups`.

    Args:
        groups: optimizer groups: {"params": {name: tensor}, "lr": float, "weight_decay": float}.
        state_file: where the state is kept; if it exists, training goes on from it.

    Raises:
        NonFiniteLoss: names the step; the batch is saved beside the state.
    """
    accelerator = accelerator or Accelerator()
    named = {key: tensor for group in groups for key, tensor in group["params"].items()}
    optimizer = torch.optim.AdamW(
        [{**group, "params": list(group["params"].values()), "peak": group["lr"]} for group in groups],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    objective, optimizer = accelerator.prepare(objective, optimizer)
    log = TrainingLog()
    start = _load(state_file, named, optimizer, log) if state_file.is_file() else 0
    log.resumed_at = start
    log.tokens = start * config.batch_size * data.length
    save_every = config.save_every or max(1, math.ceil(config.steps / 10))
    share, rank = config.batch_size // accelerator.num_processes, accelerator.process_index
    tokens = config.batch_size * data.length
    began = time.perf_counter()
    spent = log.seconds
    schedule = RateSchedule(config.schedule, config.steps, config.warmup, config.final_rate)
    for value in log.losses:
        schedule.observe(value)
    objective.train()
    with meter(name, config.steps, start) as progress:
        for step in range(start, config.steps):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * schedule.factor(step)
            torch.manual_seed(config.seed * 1_000_003 + step)
            batch = data.batch(step, config.batch_size, config.seed)[rank * share : (rank + 1) * share]
            loss = objective(batch.to(accelerator.device))
            accelerator.backward(loss)
            value = float(accelerator.reduce(loss.detach(), "mean"))
            if not math.isfinite(value):
                save_file({"input_ids": batch}, state_file.with_suffix(".bad_batch.safetensors"))
                raise NonFiniteLoss(
                    f"{name}: the loss is {value} at step {step}; lower the learning rate and --resume "
                    f"(batch kept in {state_file.with_suffix('.bad_batch.safetensors')})"
                )
            accelerator.clip_grad_norm_(list(named.values()), config.clip)
            optimizer.step()
            optimizer.zero_grad()
            log.losses.append(value)
            schedule.observe(value)
            log.tokens = (step + 1) * tokens
            log.seconds = spent + time.perf_counter() - began
            progress.update(step + 1, tokens, value)
            if (step + 1) % save_every == 0 or step + 1 == config.steps:
                if accelerator.is_main_process:
                    _save(state_file, named, optimizer, log, step + 1)
                accelerator.wait_for_everyone()
    return log


# ---------------------------------------------------------------------- state on disk


def _moments(optimizer: torch.optim.Optimizer, named: dict[str, torch.Tensor]) -> dict[str, dict]:
    state = getattr(optimizer, "optimizer", optimizer).state
    return {name: state[tensor] for name, tensor in named.items() if tensor in state}


def _save(
    file: Path, named: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, log: TrainingLog, step: int
) -> None:
    """Write trained tensors, moments and step in one file, which appears whole or not at all."""
    tensors = {f"tensor.{name}": tensor.detach() for name, tensor in named.items()}
    for name, moments in _moments(optimizer, named).items():
        tensors |= {f"{key}.{name}": torch.as_tensor(value) for key, value in moments.items()}
    metadata = {"step": str(step), "seconds": str(log.seconds), "losses": json.dumps(log.losses)}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, temporary, metadata)
    with open(temporary, "rb") as handle:
        os.fsync(handle.fileno())
    os.replace(temporary, file)


def _load(file: Path, named: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, log: TrainingLog) -> int:
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
        state = getattr(optimizer, "optimizer", optimizer).state
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(handle.get_tensor(f"tensor.{name}"))
                keys = [k for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}.{name}" in handle.keys()]  # noqa: SIM118
                state[tensor] = {
                    k: handle.get_tensor(f"{k}.{name}").to("cpu" if k == "step" else tensor.device) for k in keys
                }
    log.losses = json.loads(metadata["losses"])
    log.seconds = float(metadata["seconds"])
    return int(metadata["step"])
