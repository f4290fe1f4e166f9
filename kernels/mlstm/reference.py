"""The specification: mLSTM as a plain loop over time, in any float dtype."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype

MLSTMState = tuple[Tensor, Tensor, Tensor]
"""m [B, H], C [B, H, K, V] and n [B, H, K]; C and n stand for `e^m C` and `e^m n`."""

LARGEST_M = 60.0  # e^-60 is the least denominator, so that q = 0 gives 0


def normalised(numerator: Tensor, denominator: Tensor, m: Tensor) -> Tensor:
    """`numerator / max(|denominator|, e^{-m})` with exponents at most 0; `[..., V]`, `[...]` and `[...]`."""
    shrink, least = m.clamp_max(0).exp(), (-m.clamp(0, LARGEST_M)).exp()
    return numerator * (shrink / torch.maximum(denominator.abs() * shrink, least))[..., None]


def mlstm_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    i_BTH: Tensor,
    f_BTH: Tensor,
    *,
    scale: float,
    initial_state: MLSTMState | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, MLSTMState]:
    """The equations of `mlstm`, token by token; same arguments. Returns output and final state."""
    tensors = (q_BTHK, k_BTHK, v_BTHV, i_BTH, f_BTH)
    dtype = compute_dtype(*tensors, *(initial_state or ()))
    B, T, H, K = q_BTHK.shape
    V = v_BTHV.shape[-1]
    if cu_seqlens is not None:
        outputs, finals = [v_BTHV[:, :0]], []
        for sequence, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            here = slice(sequence, sequence + 1)
            first = (
                None
                if initial_state is None
                else (initial_state[0][here], initial_state[1][here], initial_state[2][here])
            )
            o, final = mlstm_reference(*(x[:, start:end] for x in tensors), scale=scale, initial_state=first)
            outputs.append(o)
            finals.append(final)
        if not finals:
            none = q_BTHK.new_zeros(0, H, K, V, dtype=dtype)
            return v_BTHV.clone(), (none[:, :, 0, 0], none, none[..., 0])
        m, C, n = (torch.cat(parts) for parts in zip(*finals, strict=True))
        return torch.cat(outputs, 1), (m, C, n)

    q, k, v, i, f = (x.to(dtype) for x in tensors)
    if initial_state is None:
        m, C, n = q.new_zeros(B, H), q.new_zeros(B, H, K, V), q.new_zeros(B, H, K)
    else:
        m, C, n = (x.to(dtype) for x in initial_state)
    log_f = F.logsigmoid(f)
    outputs = []
    for t in range(T):
        before, m = m, torch.maximum(log_f[:, t] + m, i[:, t]).detach()
        keep, take = (log_f[:, t] + before.detach() - m).exp(), (i[:, t] - m).exp()
        written = take[..., None] * k[:, t]
        C = keep[..., None, None] * C + written[..., None] * v[:, t, :, None]
        n = keep[..., None] * n + written
        query = scale * q[:, t]
        read, weight = torch.einsum("bhkv,bhk->bhv", C, query), (n * query).sum(-1)
        outputs.append(normalised(read, weight, m))
    o = torch.stack(outputs, 1).to(v_BTHV.dtype) if outputs else v_BTHV.clone()
    return o, (m, C, n)
