"""Rotary positions in the layout of Hugging Face models: the two halves of the rotated channels pair up."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """x [..., K] turned by tables [..., R] with R <= K; the channels from R on stay as they are."""
    if cos is None or sin is None:
        return x
    R = cos.shape[-1]
    low, high = x[..., : R // 2], x[..., R // 2 : R]
    turned = x[..., :R] * cos.to(x.dtype) + torch.cat([-high, low], dim=-1) * sin.to(x.dtype)
    return turned if x.shape[-1] == R else torch.cat([turned, x[..., R:]], dim=-1)
