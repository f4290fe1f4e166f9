"""The specification: the delta rule as a plain loop over time, in any float dtype."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype


def delta_rule_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`S_t = A_t S_{t-1} + β_t k_t (v_t − (A_t S_{t-1})ᵀ k_t)ᵀ`, `o_t = scale · S_tᵀ q_t`.

    Arguments as `delta_rule`; returns output and final state.
    """
    B, T, H, K = q_BTHK.shape
    V = v_BTHV.shape[-1]
    dtype = compute_dtype(q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay, initial_state)
    scale = K**-0.5 if scale is None else scale

    if cu_seqlens is not None:
        outputs, states = [], []
        for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            here = slice(start, end)
            o, state = delta_rule_reference(
                q_BTHK[:, here],
                k_BTHK[:, here],
                v_BTHV[:, here],
                beta_BTH[:, here],
                None if log_decay is None else log_decay[:, here],
                scale=scale,
                initial_state=None if initial_state is None else initial_state[n : n + 1],
            )
            outputs.append(o)
            states.append(state)
        if not outputs:
            return v_BTHV.clone(), v_BTHV.new_zeros(0, H, K, V, dtype=dtype)
        return torch.cat(outputs, dim=1), torch.cat(states)

    q, k, v, beta = q_BTHK.to(dtype) * scale, k_BTHK.to(dtype), v_BTHV.to(dtype), beta_BTH.to(dtype)
    state = q.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(T):
        if log_decay is not None:
            state = log_decay[:, t].to(dtype).reshape(B, H, -1, 1).exp() * state
        recalled = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        error = v[:, t] - recalled
        state = state + (beta[:, t, :, None] * k[:, t])[..., None] * error[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    o = torch.stack(outputs, dim=1) if outputs else v
    return o.to(v_BTHV.dtype), state
