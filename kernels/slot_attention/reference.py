"""The specification: gated slot attention as a plain loop over time, in any float dtype."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype

Slots = tuple[Tensor, Tensor]
"""What the slots hold: keys [B, H, M, K] and values [B, H, M, V]."""


def slot_attention_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    s_BTHM: Tensor,
    log_decay_BTHM: Tensor,
    *,
    scale: float,
    initial_state: Slots | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Slots]:
    """`K̃_t = diag(a_t) K̃_{t-1} + s_t k_tᵀ`, `Ṽ_t` alike with `v_t`, `o_t = Ṽ_tᵀ softmax(scale · K̃_t q_t)`.

    Arguments as `slot_attention`; returns output and final slots.
    """
    tensors = (q_BTHK, k_BTHK, v_BTHV, s_BTHM, log_decay_BTHM)
    dtype = compute_dtype(*tensors, *(initial_state or ()))
    B, T, H, K = q_BTHK.shape
    V, M = v_BTHV.shape[-1], s_BTHM.shape[-1]
    if cu_seqlens is not None:
        outputs, finals = [v_BTHV[:, :0]], []
        for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            first = None if initial_state is None else (initial_state[0][n : n + 1], initial_state[1][n : n + 1])
            o, final = slot_attention_reference(*(x[:, start:end] for x in tensors), scale=scale, initial_state=first)
            outputs.append(o)
            finals.append(final)
        if not finals:
            return v_BTHV.clone(), (
                q_BTHK.new_zeros(0, H, M, K, dtype=dtype),
                q_BTHK.new_zeros(0, H, M, V, dtype=dtype),
            )
        return torch.cat(outputs, 1), (torch.cat([f[0] for f in finals]), torch.cat([f[1] for f in finals]))

    q, k, v, s, decay = (x.to(dtype) for x in (q_BTHK, k_BTHK, v_BTHV, s_BTHM, log_decay_BTHM))
    decay = decay.exp()
    if initial_state is None:
        keys, values = q.new_zeros(B, H, M, K), q.new_zeros(B, H, M, V)
    else:
        keys, values = (x.to(dtype) for x in initial_state)
    outputs = []
    for t in range(T):
        keys = decay[:, t, :, :, None] * keys + s[:, t, :, :, None] * k[:, t, :, None]
        values = decay[:, t, :, :, None] * values + s[:, t, :, :, None] * v[:, t, :, None]
        weights = (scale * torch.einsum("bhmk,bhk->bhm", keys, q[:, t])).softmax(-1)
        outputs.append(torch.einsum("bhmv,bhm->bhv", values, weights))
    o = torch.stack(outputs, 1).to(v_BTHV.dtype) if outputs else v_BTHV.clone()
    return o, (keys, values)
