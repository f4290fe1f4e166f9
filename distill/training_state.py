"""What a training loop keeps on disk: one safetensors file with trained tensors, moments, losses and the step.

Tensors are whole, however many processes trained them, so any number of processes can go on from the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of a tensor."""

Moments = dict[str, dict[str, torch.Tensor]]
"""By tensor, then by `MOMENTS`."""


@dataclass
class TrainingLog:
    """What a stage did. Losses are one per step."""

    losses: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    resumed_at: int = 0


def write_state(
    file: Path,
    named: dict[str, torch.Tensor],
    moments: Moments,
    whole: Callable[[torch.Tensor], torch.Tensor],
    log: TrainingLog,
    step: int,
    write: bool = True,
) -> None:
    """Write the state after `step` steps; the file appears whole or not at all.

    Args:
        whole: gathers a tensor that lies in pieces on several processes; every process must call this function.
        write: whether this process writes.
    """
    parts = {f"tensor.{name}": tensor.detach() for name, tensor in named.items()}
    for name, state in moments.items():
        parts |= {f"{key}.{name}": torch.as_tensor(value) for key, value in state.items()}
    tensors = {}
    for name, part in parts.items():
        tensor = whole(part)
        if write:
            tensors[name] = tensor.contiguous().cpu()
    if not write:
        return
    metadata = {"step": str(step), "seconds": str(log.seconds), "losses": json.dumps(log.losses)}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    save_file(tensors, temporary, metadata)
    with open(temporary, "rb") as handle:
        os.fsync(handle.fileno())
    os.replace(temporary, file)


@torch.no_grad()
def read_state(file: Path, named: dict[str, torch.Tensor], log: TrainingLog) -> tuple[int, Moments]:
    """Fill the tensors and the log from a file, if it is there; returns the steps done and the moments (on the CPU)."""
    if not file.is_file():
        return 0, {}
    moments: Moments = {}
    with safe_open(file, framework="pt") as handle:
        metadata, present = handle.metadata(), set(handle.keys())
        for name, tensor in named.items():
            tensor.copy_(handle.get_tensor(f"tensor.{name}"))
            moments[name] = {k: handle.get_tensor(f"{k}.{name}") for k in MOMENTS if f"{k}.{name}" in present}
    log.losses = json.loads(metadata["losses"])
    log.seconds = float(metadata["seconds"])
    return int(metadata["step"]), moments
