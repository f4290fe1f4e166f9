"""How a model lies on the processes that train it: whole in one, whole in each (DDP), in pieces (FSDP2), or ZeRO.

Which one is decided by the launcher (`accelerate launch --config_file ...`), never by the recipe: the losses are the
same. Shards are in `sharding`, DeepSpeed in `zero`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from linearize.convert.errors import ConversionError
from linearize.distill import processes
from linearize.distill.training_state import MOMENTS, Moments

Groups = list[dict[str, Any]]
"""Optimizer groups: {"params": {name: tensor}, "lr": highest rate, "weight_decay": float}."""


class Placement:
    """A model that lies whole in its only process.

    Attributes:
        objective: to be called with a batch.
        named: the tensors that train.
        optimizer: AdamW over them; a group's highest rate is its "peak".
    """

    optimizer: Any

    def __init__(self, objective: nn.Module, groups: Groups) -> None:
        self.objective = objective
        self.named: dict[str, torch.Tensor] = {n: p for group in groups for n, p in group["params"].items()}
        self.device = next(iter(self.named.values())).device
        self.optimizer = adamw(groups, fused=self.device.type == "cuda")

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Context of one forward and backward pass; gradients meet after the last one of a step."""
        yield

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, clip: float, loss: torch.Tensor) -> torch.Tensor:
        """Update; returns the norm of the gradient before it was cut to `clip`.

        Nothing moves if it or the step's `loss` is not finite. A fused optimizer finds that out by itself, so that the
        host need not wait for either number before it hands out the update's work.
        """
        norm = self.clip(clip)
        finite = norm.isfinite() & loss.isfinite()
        if self.optimizer.defaults["fused"]:
            self.optimizer.found_inf = 1.0 - finite.float()
            self.optimizer.step()
        elif finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def clip(self, largest: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(list(self.named.values()), largest)

    def moments(self) -> Moments:
        """The optimizer's state of every tensor."""
        state = self.optimizer.state
        return {name: dict(state[tensor]) for name, tensor in self.named.items() if tensor in state}

    def load_moments(self, moments: Moments) -> None:
        """Continue from the moments of a saved state."""
        for name, saved in moments.items():
            tensor = self.named[name]
            state = {
                key: saved[key] if key == "step" else self.part(saved[key], tensor) for key in MOMENTS if key in saved
            }
            if "step" in state and self.optimizer.defaults["fused"]:
                state["step"] = state["step"].to(tensor.device)
            self.optimizer.state[tensor] = state

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that may lie in pieces, gathered."""
        return tensor

    def part(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """What this process holds of a whole tensor."""
        return tensor.to(like.device)

    def close(self) -> None:
        """Leave the model as one that a single process holds."""


class Replicated(Placement):
    """Whole in every process; gradients are averaged while they are made (DDP)."""

    def __init__(self, objective: nn.Module, groups: Groups) -> None:
        super().__init__(objective, groups)
        self.objective = DistributedDataParallel(
            objective,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            find_unused_parameters=True,  # a branch can be off for a step, a layer for a round
        )

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with nullcontext() if last else self.objective.no_sync():  # type: ignore[operator]
            yield


def adamw(groups: Groups, fused: bool = False) -> torch.optim.AdamW:
    """The optimizer of all stages; fused, it is one kernel that counts its steps on the GPU."""
    return torch.optim.AdamW(
        [{**group, "params": list(group["params"].values()), "peak": group["lr"]} for group in groups],
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=fused or None,
    )


def place(objective: nn.Module, groups: Groups, micro_batch_size: int, clip: float, accumulation: int) -> Placement:
    """As the launcher says.

    Args:
        micro_batch_size, clip, accumulation: what DeepSpeed wants to know beforehand.

    Raises:
        ConversionError: the launcher's configuration asks for what is not supported.
    """
    from linearize.distill.sharding import Sharded
    from linearize.distill.zero import Zero

    if processes.launched_with("DEEPSPEED"):
        return Zero(objective, groups, micro_batch_size, accumulation, clip)
    if processes.count() == 1:
        return Placement(objective, groups)
    if not hasattr(objective, "student"):
        raise ConversionError(
            "layer-by-layer transfer (stream: true) is work for one process; start it without launcher"
        )
    if processes.launched_with("FSDP"):
        return Sharded(objective, groups)
    return Replicated(objective, groups)
