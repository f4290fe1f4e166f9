"""The gates in plain torch and float32, safe where softplus underflows; differentiated by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(torch.float32, x.dtype))


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return _wide(x) if bias is None else _wide(x) + bias


def ddts_gates_chunked(
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    k_BTHK: Tensor,
    a_bias_HK: Tensor | None,
    b_bias_HK: Tensor | None,
    silu: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `ddts_gates_reference`."""
    # exp(logsigmoid(b)): the derivative of torch.sigmoid, σ (1 − σ), loses its digits where σ is nearly 1.
    a, temperature = _biased(a_BTHK, a_bias_HK), torch.exp(F.logsigmoid(_biased(b_BTHK, b_bias_HK)))
    # For very negative a, softplus(a) is e^a: its logarithm is a even where e^a is 0.
    rate = F.softplus(a)
    log_rate = torch.where(a < -15, a, torch.log(rate.clamp_min(torch.finfo(rate.dtype).tiny)))
    k = F.silu(_wide(k_BTHK)) if silu else _wide(k_BTHK)
    k = F.normalize(k, dim=-1, eps=eps) * torch.exp(temperature * log_rate)
    return -rate * temperature, k.to(k_BTHK.dtype)


def softplus_gate_chunked(x: Tensor, A_log: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `softplus_gate_reference`."""
    step = F.softplus(_biased(x, bias))
    return -A_log.exp() * step, step
