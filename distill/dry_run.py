"""What a training step costs, found by running it on the meta device: every operation, no number.

Operations are counted as torch counts them (matrix products and attention, two per multiplication and addition).
Memory is that of all tensors alive at once, by the life of their storages. Both are exact for the plain-torch kernels;
on a GPU the Triton kernels keep less, so that the memory is an upper estimate there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

META = torch.device("meta")


@dataclass(frozen=True)
class Cost:
    """Of one step.

    Attributes:
        flops: operations.
        peak_bytes: largest memory of all tensors, the model's included.
    """

    flops: int
    peak_bytes: int


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Context in which a decoder runs on meta tensors.

    transformers looks at the values of masks unless it is being traced, and torch has no autocast for this device.
    """
    with (
        mock.patch("transformers.masking_utils.is_tracing", lambda *_, **__: True),
        mock.patch("torch.autocast", lambda *_, **__: contextlib.nullcontext()),
        mock.patch("torch.is_autocast_enabled", lambda *_: False),
    ):
        yield


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of all tensors made inside, and of those it is told of, and their peak."""

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hold(held)

    def _hold(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._release, storage.nbytes())
        self.peak = max(self.peak, self.live)

    def _release(self, nbytes: int) -> None:
        self.live -= nbytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._hold(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def step_cost(objective: nn.Module, groups: list[dict[str, Any]], batch: torch.Tensor) -> Cost:
    """A forward and backward pass and AdamW's update, as `train` makes them. The second step: by then moments exist.

    Args:
        objective: on the meta device, `objective(batch)` is a scalar.
        groups: optimizer groups, see `train`.
        batch: what the objective reads, on the meta device.
    """
    parameters = [list(group["params"].values()) for group in groups]
    optimizer = torch.optim.AdamW([{"params": members, "lr": 1e-3} for members in parameters])
    memory = LiveBytes([*objective.parameters(), *objective.buffers(), batch])
    flops = FlopCounterMode(display=False)
    with on_meta():
        for counter in (contextlib.nullcontext(), flops):
            with memory, counter:
                objective(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    return Cost(flops.get_total_flops(), memory.peak)


@torch.no_grad()
def forward_cost(model: nn.Module, batch: torch.Tensor) -> Cost:
    """One pass of a model on the meta device over token ids `[B, T]`."""
    memory = LiveBytes([*model.parameters(), *model.buffers(), batch])
    flops = FlopCounterMode(display=False)
    with on_meta(), memory, flops:
        model(input_ids=batch, use_cache=False)
    return Cost(flops.get_total_flops(), memory.peak)
