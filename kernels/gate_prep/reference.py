"""The gates as their formulas have them: the specification, exact in float64 for projections of size 100."""

from __future__ import annotations

import torch
from torch import Tensor


def ddts_gates_reference(
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    k_BTHK: Tensor,
    a_bias_HK: Tensor | None,
    b_bias_HK: Tensor | None,
    silu: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Log decay [B,T,H,K] and gated key [B,T,H,K]; `silu` is of the key, before all else."""
    dtype = torch.promote_types(torch.float32, torch.promote_types(a_BTHK.dtype, k_BTHK.dtype))
    a, b, k = (x.to(dtype) for x in (a_BTHK, b_BTHK, k_BTHK))
    a = a if a_bias_HK is None else a + a_bias_HK
    b = b if b_bias_HK is None else b + b_bias_HK
    k = k * torch.sigmoid(k) if silu else k
    # torch.sigmoid's derivative, σ (1 − σ), is 0 in float64 from b = 37 on; that of this is not.
    rate, temperature = torch.logaddexp(a, torch.zeros_like(a)), torch.exp(-torch.logaddexp(-b, torch.zeros_like(b)))
    length = torch.linalg.vector_norm(k, dim=-1, keepdim=True).clamp_min(eps)
    return -rate * temperature, (k / length * rate**temperature).to(k_BTHK.dtype)


def softplus_gate_reference(x: Tensor, A_log: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log decay and step, of x's shape; A_log and bias have its inner dimensions."""
    x = x.to(torch.promote_types(torch.float32, x.dtype))
    x = x if bias is None else x + bias
    step = torch.logaddexp(x, torch.zeros_like(x))
    return -A_log.exp() * step, step
