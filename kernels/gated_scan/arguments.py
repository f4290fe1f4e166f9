"""Checks of what the gated recurrences have in common: gates, chunk sizes, positions."""

from __future__ import annotations

import torch
from torch import Tensor


def check_gate(operation: str, gate: Tensor) -> None:
    """Check that gates lie in [0, 1]. Only on the CPU: on a GPU it would make the host wait."""
    if gate.device.type == "cpu" and not torch.compiler.is_compiling() and gate.numel() > 0:
        low, high = (float(edge) for edge in gate.detach().aminmax())
        if low < 0 or high > 1:
            raise ValueError(
                f"{operation}: gate has values from {low:.4g} to {high:.4g}; it is the weight of the state "
                "before, so pass values in [0, 1] (for example the sigmoid of a projection)"
            )


def check_chunk_size(operation: str, chunk_size: object, *, optional: bool = True) -> None:
    """Check that a chunk size is a power of two (or None)."""
    if chunk_size is None and optional:
        return
    if (
        not isinstance(chunk_size, int)
        or isinstance(chunk_size, bool)
        or chunk_size < 1
        or chunk_size & (chunk_size - 1)
    ):
        raise ValueError(f"{operation}: chunk_size is {chunk_size!r}; it must be a power of two (1, 2, 4, ...)")


def check_position(operation: str, position: object, sequences: int, device: torch.device) -> None:
    """Check a position: an int >= 0, or one integer per sequence."""
    if isinstance(position, Tensor):
        if position.shape != (sequences,) or position.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{operation}: position is {tuple(position.shape)} {position.dtype}; it must be an int, or "
                f"[{sequences}] of int32 or int64"
            )
        if position.device != device:
            raise ValueError(f"{operation}: position is on {position.device} but x is on {device}; move it there")
    elif not isinstance(position, int) or isinstance(position, bool) or position < 0:
        raise ValueError(f"{operation}: position is {position!r}; it must be an integer >= 0, or a tensor of them")
