"""The specification: linear attention as a plain loop over time, in any float dtype."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any input has it, else float32: what the inside of every form is computed in."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def linear_attention_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay: Tensor | None = None,
    *,
    bonus_HK: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`S_t = diag(a_t) S_{t-1} + k_t v_tᵀ`, `o_t = scale · S_tᵀ q_t`; arguments as `linear_attention`.

    With a bonus `u`, `o_t = scale · (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ q_t`. Returns output and final state.
    """
    B, T, H, K = q_BTHK.shape
    V = v_BTHV.shape[-1]
    dtype = compute_dtype(q_BTHK, k_BTHK, v_BTHV, log_decay, initial_state)
    scale = K**-0.5 if scale is None else scale

    if cu_seqlens is not None:
        outputs, states = [], []
        bounds = cu_seqlens.tolist()
        for n, (start, end) in enumerate(itertools.pairwise(bounds)):
            here = slice(start, end)
            per_token = log_decay is not None and log_decay.dim() > 1
            o, state = linear_attention_reference(
                q_BTHK[:, here],
                k_BTHK[:, here],
                v_BTHV[:, here],
                log_decay[:, here] if log_decay is not None and per_token else log_decay,
                bonus_HK=bonus_HK,
                scale=scale,
                initial_state=None if initial_state is None else initial_state[n : n + 1],
            )
            outputs.append(o)
            states.append(state)
        if not outputs:
            return v_BTHV.clone(), v_BTHV.new_zeros(0, H, K, V, dtype=dtype)
        return torch.cat(outputs, dim=1), torch.cat(states)

    q, k, v = q_BTHK.to(dtype) * scale, k_BTHK.to(dtype), v_BTHV.to(dtype)
    state = q.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(T):
        update = k[:, t, :, :, None] * v[:, t, :, None, :]
        previous = state
        if log_decay is None:
            state = previous + update
        else:
            g = log_decay.to(dtype)
            g = g.view(1, H, 1, 1) if g.dim() == 1 else g[:, t].reshape(B, H, -1, 1)
            state = g.exp() * previous + update
        seen = state if bonus_HK is None else previous + bonus_HK.to(dtype)[:, :, None] * update
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], seen))
    o = torch.stack(outputs, dim=1) if outputs else v
    return o.to(v_BTHV.dtype), state
