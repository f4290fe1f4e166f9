"""Checks that the window beside linear attention and its step share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from linearize.kernels.window_attention.arguments import check_heads


def check_all_heads(operation: str, dims: Mapping[str, int]) -> None:
    """Check that the heads of k, v and phi_k can be shared by q's."""
    check_heads(operation, dims)
    if dims["Hf"] < 1 or dims["H"] % dims["Hf"]:
        raise ValueError(
            f"{operation}: phi_k has {dims['Hf']} heads and q {dims['H']}; q's must be a multiple of phi_k's"
        )


def check_shift(operation: str, shift: object) -> None:
    """Check what the window's logits are shifted by."""
    if shift not in ("window", "none"):
        raise ValueError(f'{operation}: shift is {shift!r}; use "window" or "none"')


def check_mask(operation: str, key_mask: Tensor | None) -> None:
    """Check the mask's dtype."""
    if key_mask is not None and key_mask.dtype != torch.bool:
        raise TypeError(f"{operation}: key_mask has dtype {key_mask.dtype}; convert it to bool, True = real key")
