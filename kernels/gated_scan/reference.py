"""The specification: a gated running mean as a plain loop over time, in any float dtype."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype


def gated_scan_reference(
    x: Tensor,
    gate: Tensor,
    chunk_size: int | None = None,
    *,
    position: int | Tensor = 0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`y_t = g_t ⊙ y_{t-1} + (1 − g_t) ⊙ x_t`; arguments as `gated_scan`. Returns y and the last state."""
    dtype = compute_dtype(x, gate, initial_state)
    if cu_seqlens is not None:
        outputs, states = [x[:, :0]], []
        for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            y, state = gated_scan_reference(
                x[:, start:end],
                gate[:, start:end],
                chunk_size,
                position=position if isinstance(position, int) else position[n : n + 1],
                initial_state=None if initial_state is None else initial_state[n : n + 1],
            )
            outputs.append(y)
            states.append(state)
        none = x.new_zeros(0, *x.shape[2:], dtype=dtype)
        return torch.cat(outputs, dim=1), torch.cat(states) if states else none

    wide, g = x.to(dtype), gate.to(dtype)
    shape = (x.shape[0], *(1,) * (x.dim() - 2))
    state = wide.new_zeros(x.shape[0], *x.shape[2:]) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(x.shape[1]):
        if chunk_size is not None:
            step = torch.as_tensor(position, device=x.device) + t
            state = torch.where((step % chunk_size == 0).expand(shape[0]).view(shape), 0, state)
        state = g[:, t] * state + (1 - g[:, t]) * wide[:, t]
        outputs.append(state)
    y = torch.stack(outputs, dim=1) if outputs else wide
    return y.to(x.dtype), state
