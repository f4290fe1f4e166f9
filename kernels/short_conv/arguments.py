"""Checks that the short convolution and its step share."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_TAPS = 16  # of the Triton kernels, which unroll them


def check_activation(operation: str, activation: object) -> None:
    """Check the activation's name."""
    if activation not in (None, "silu"):
        raise ValueError(f'{operation}: activation is {activation!r}; use None or "silu"')


def no_kernel_for(x: Tensor, weight: Tensor, *others: Tensor | None) -> str | None:
    """Why these tensors have no Triton kernel, or None if they have one."""
    if any(t is not None and t.dtype == torch.float64 for t in (x, weight, *others)):
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    if weight.shape[1] > MAX_TAPS:
        return f"the Triton kernels take up to W={MAX_TAPS} taps, not {weight.shape[1]}"
    return None
