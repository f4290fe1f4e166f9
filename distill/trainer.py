"""The training loop: any objective, resumable to the exact step, on any number of processes.

The batch, everything random and the learning rate are functions of the step (the rate of `plateau` also of the losses,
which the state keeps), so a run that was killed continues from its last saved state as if it had never stopped.
Every process knows the whole batch and computes the loss of its rows; weights make their mean that of one process.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from linearize.convert.errors import ConversionError
from linearize.distill import processes
from linearize.distill.compiled import compiled
from linearize.distill.data import TokenBlocks
from linearize.distill.diagnosis import first_nonfinite
from linearize.distill.fused_norms import fused_norms
from linearize.distill.layout import IGNORED, apart
from linearize.distill.loss_log import LossLog, Tracker
from linearize.distill.memory import memory_in_use
from linearize.distill.placement import Groups, Placement, place
from linearize.distill.progress import meter
from linearize.distill.schedules import RateSchedule, Schedule
from linearize.distill.training_state import TrainingLog, read_state, write_state

__all__ = ["LoopConfig", "NonFiniteLoss", "TrainingLog", "train"]


class NonFiniteLoss(ConversionError):
    """Training met a loss or a gradient that is NaN or infinite; the last good state is on disk."""


@dataclass(frozen=True)
class LoopConfig:
    """How long and how fast to train.

    Attributes:
        batch_size: sequences per step, all processes together.
        schedule, warmup, final_rate: see `RateSchedule`.
        clip: largest norm of the gradient of all groups together.
        save_every: steps between saved states; 0 for about ten in all.
        accumulation: forward passes that a process makes of its part of a batch, to need less memory.
        gradient_checkpointing: make blocks' activations again in the backward pass, not keep them.
        compile: run mixers, attention and MLPs through torch.compile (see `compiled`).
        report_to: trackers beside the CSV file.
    """

    steps: int
    batch_size: int
    seed: int
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    final_rate: float = 0.05
    clip: float = 1.0
    save_every: int = 0
    accumulation: int = 1
    gradient_checkpointing: bool = False
    compile: bool = False
    report_to: tuple[Tracker, ...] = ()


@dataclass(frozen=True)
class Part:
    """Rows of a batch that one process computes in one pass.

    Attributes:
        weight: of its loss in the mean over the parts of all processes, times the number of processes.
        share: of the weight of all processes' parts of the same pass.
    """

    rows: torch.Tensor
    weight: float
    share: float


def train(
    name: str, objective: nn.Module, groups: Groups, data: TokenBlocks, config: LoopConfig, state_file: Path
) -> TrainingLog:
    """Minimise `objective(batch)` (a scalar) over the tensors in `groups`.

    Args:
        groups: optimizer groups: {"params": {name: tensor}, "lr": float, "weight_decay": float}.
        state_file: where the state is kept; if it exists, training goes on from it. The curve goes to `losses.csv`
            in its folder.

    Raises:
        NonFiniteLoss: names the step and the layer; the batch is saved beside the state.
    """
    named = {key: tensor for group in groups for key, tensor in group["params"].items()}
    processes.start(cpu=all(tensor.device.type == "cpu" for tensor in named.values()))
    log = TrainingLog()
    log.resumed_at, moments = read_state(state_file, named, log)
    objective.train()
    part = math.ceil(config.batch_size / (processes.count() * config.accumulation))
    with _checkpointed(objective, config.gradient_checkpointing):
        placement = place(objective, groups, part, config.clip, config.accumulation)
        try:
            student = _student(placement.objective)
            with compiled(student, config.compile), fused_norms(placement.objective):
                placement.load_moments(moments)
                _Loop(name, placement, data, config, state_file, log).run()
        finally:
            placement.close()
    return log


class _Loop:
    """The steps of one call of `train`."""

    def __init__(
        self, name: str, placement: Placement, data: TokenBlocks, config: LoopConfig, state_file: Path, log: TrainingLog
    ) -> None:
        self.name, self.placement, self.data, self.config = name, placement, data, config
        self.state_file, self.log = state_file, log
        self.tokens = config.batch_size * data.length
        self.schedule = RateSchedule(config.schedule, config.steps, config.warmup, config.final_rate)
        for value in log.losses:
            self.schedule.observe(value)

    def run(self) -> None:
        config, log, start = self.config, self.log, self.log.resumed_at
        log.tokens = start * self.tokens
        save_every = config.save_every or max(1, math.ceil(config.steps / 10))
        spent, began = log.seconds, time.perf_counter()
        with _curve(self.state_file, start, config) as curve, meter(self.name, config.steps, start) as progress:
            for step in range(start, config.steps):
                before = time.perf_counter()
                value = self.step(step)
                log.losses.append(value)
                self.schedule.observe(value)
                log.tokens = (step + 1) * self.tokens
                log.seconds = spent + time.perf_counter() - began
                memory = memory_in_use(self.placement.device)
                if curve is not None:
                    rate = self.tokens / max(time.perf_counter() - before, 1e-9)
                    curve.row(step + 1, value, self.factor, rate, memory)
                progress.update(step + 1, self.tokens, value, memory)
                if (step + 1) % save_every == 0 or step + 1 == config.steps:
                    self.save(step + 1)

    def step(self, step: int) -> float:
        """One update; returns the loss before it."""
        placement, config = self.placement, self.config
        self.factor = self.schedule.factor(step)
        for group in placement.optimizer.param_groups:
            group["lr"] = group["peak"] * self.factor
        torch.manual_seed(config.seed * 1_000_003 + step)
        batch = self.data.batch(step, config.batch_size, config.seed)
        parts = parts_of(batch, config.accumulation)
        total = torch.zeros((), device=placement.device)
        for number, part in enumerate(parts):
            with placement.micro_batch(number + 1 == len(parts)), processes.part_of_batch(part.share):
                loss = self.loss(part) * part.weight
                placement.backward(loss)
            total += loss.detach()
        mean = processes.summed(total) / processes.count()
        norm = placement.step(config.clip, mean)
        value = float(mean)
        if not math.isfinite(value):
            self.stop(step, batch, parts, "loss", value)
        if not math.isfinite(norm):
            self.stop(step, batch, parts, "gradient", float(norm))
        return value

    def loss(self, part: Part) -> torch.Tensor:
        rows, objective = part.rows.to(self.placement.device), self.placement.objective
        if not self.data.apart:
            return objective(rows)
        with apart(rows) as batch:
            return objective(batch)

    def stop(self, step: int, batch: torch.Tensor, parts: list[Part], what: str, value: float) -> None:
        """Name where a number that is not finite came from, and keep the batch."""
        file = self.state_file.with_suffix(".bad_batch.safetensors")
        if processes.is_main():
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({"input_ids": batch.contiguous()}, file)
        torch.manual_seed(self.config.seed * 1_000_003 + step)
        objective = self.placement.objective
        places = [first_nonfinite(objective, lambda p=p: self._again(p)) for p in parts]  # type: ignore[misc]
        found = processes.from_any(next((place for place in places if place), None))
        where = f"first in {found.removeprefix('module.').removeprefix('student.')}" if found else "behind the layers"
        kept = (
            f"the state of step {self._saved(step)} is kept" if self.state_file.is_file() else "no state was saved yet"
        )
        raise NonFiniteLoss(
            f"{self.name}: the {what} is {value} at step {step}, {where}; {kept}, the batch is in {file}; "
            "lower the learning rate and --resume"
        )

    def _again(self, part: Part) -> None:
        with processes.part_of_batch(part.share):
            self.loss(part)

    def _saved(self, step: int) -> int:
        every = self.config.save_every or max(1, math.ceil(self.config.steps / 10))
        return max(step // every * every, self.log.resumed_at)

    def save(self, step: int) -> None:
        placement = self.placement
        moments = placement.moments()
        write_state(
            self.state_file, placement.named, moments, placement.whole, self.log, step, write=processes.is_main()
        )
        processes.barrier()


def parts_of(batch: torch.Tensor, passes: int) -> list[Part]:
    """What this process computes of a batch `[B, ...]`, one part for every pass.

    Where there are more parts than rows, some get the first row with a weight of 0, so that all processes do the same.
    """
    count, rank = processes.count(), processes.rank()
    size = math.ceil(len(batch) / (count * passes))
    pieces = [batch[i * size : (i + 1) * size] for i in range(count * passes)]
    weights = [_weight(piece) for piece in pieces]
    parts = []
    for number in range(passes):
        together = sum(weights[number * count : (number + 1) * count])
        own = number * count + rank
        share = weights[own] / together if together else 0.0
        weight = weights[own] * count / sum(weights)
        parts.append(Part(pieces[own] if len(pieces[own]) else batch[:1], weight, share))
    return parts


def _weight(rows: torch.Tensor) -> int:
    """What counts in the mean that a loss is: the labels of ids and labels `[B, 2, T]`, else the rows."""
    return int((rows[:, 1, 1:] != IGNORED).sum()) if rows.dim() == 3 else len(rows)


@contextmanager
def _curve(state_file: Path, start: int, config: LoopConfig) -> Iterator[LossLog | None]:
    if not processes.is_main():
        yield None
        return
    log = LossLog(state_file.parent, state_file.stem, start, config.report_to)
    try:
        yield log
    finally:
        log.close()


@contextmanager
def _checkpointed(objective: nn.Module, wanted: bool) -> Iterator[None]:
    """Context: the student's blocks make their activations again in the backward pass."""
    student = _student(objective) if wanted else None
    remake = functools.partial(checkpoint, use_reentrant=False)
    # not through transformers' public switch, which would leave a hook on the embeddings that only reentrant ones need
    if student is not None:
        student._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=remake)
    try:
        yield
    finally:
        if student is not None:
            student._set_gradient_checkpointing(enable=False)


def _student(objective: nn.Module) -> PreTrainedModel | None:
    return next((module for module in objective.modules() if isinstance(module, PreTrainedModel)), None)
