"""Normalised and gated rows as their formulas have them, in plain torch: the specification and the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_gate_reference(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, *, gate_first: bool, swish: bool, eps: float
) -> Tensor:
    """x and gate [..., V]; weight [V] or [H, V]; computed in float32, or float64 if x has it."""
    wide = torch.promote_types(torch.float32, x.dtype)
    y = x.to(wide)
    factor = None
    if gate is not None:
        factor = torch.sigmoid(gate.to(wide))
        factor = factor * gate.to(wide) if swish else factor
    if factor is not None and gate_first:
        y = y * factor
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if factor is not None and not gate_first:
        y = y * factor
    return y.to(x.dtype)
