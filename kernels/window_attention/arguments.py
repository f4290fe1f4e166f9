"""Checks that window attention, its step and the window beside linear attention share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MAX_WIDTH = 256  # of the Triton kernels


def check_heads(operation: str, dims: Mapping[str, int]) -> None:
    """Check that k's and v's heads can be shared by q's."""
    for name in ("Hk", "Hv"):
        if dims[name] < 1 or dims["H"] % dims[name]:
            raise ValueError(
                f"{operation}: {name[1]} has {dims[name]} heads and q {dims['H']}; q's must be a multiple of "
                f"{name[1]}'s"
            )


def check_band(operation: str, window: object, sinks: object, softcap: float | None) -> None:
    """Check what says which keys are seen and how logits are capped."""
    for name, value, least in (("window", window, 1), ("sinks", sinks, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{operation}: {name} is {value!r}; it must be an integer >= {least}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{operation}: softcap is {softcap}; it must be positive, or None for no cap")


def no_kernel_for(*tensors: Tensor) -> str | None:
    """Why these tensors have no Triton kernel, or None if they have one."""
    if any(x.dtype == torch.float64 for x in tensors):
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    widest = max(x.shape[-1] for x in tensors)
    if widest > MAX_WIDTH:
        return f"the Triton kernels take heads up to {MAX_WIDTH} wide, not {widest}"
    return None
