"""The specification: a causal depthwise convolution as a loop over time and taps, in any float dtype."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype


def short_conv_reference(
    x_BTD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None = None,
    activation: str | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`y_t = act(bias + Σ_i weight[:, i] ⊙ x_{t − W + 1 + i})`; arguments as `short_conv`."""
    W = weight_DW.shape[1]
    if cu_seqlens is not None:
        outputs, states = [x_BTD[:, :0]], [x_BTD.new_zeros(0, W - 1, x_BTD.shape[2])]
        for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            y, state = short_conv_reference(
                x_BTD[:, start:end],
                weight_DW,
                bias_D,
                activation,
                initial_state=None if initial_state is None else initial_state[n : n + 1],
            )
            outputs.append(y)
            states.append(state)
        return torch.cat(outputs, dim=1), torch.cat(states)

    dtype = compute_dtype(x_BTD, weight_DW, bias_D, initial_state)
    x, w = x_BTD.to(dtype), weight_DW.to(dtype)
    state = x.new_zeros(x.shape[0], W - 1, x.shape[2]) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(x.shape[1]):
        seen = torch.cat([state, x[:, t : t + 1]], dim=1)  # the last W inputs
        z = torch.zeros_like(x[:, t]) if bias_D is None else bias_D.to(dtype).expand_as(x[:, t])
        for i in range(W):
            z = z + w[:, i] * seen[:, i]
        outputs.append(z * torch.sigmoid(z) if activation == "silu" else z)
        state = seen[:, 1:]
    y = torch.stack(outputs, dim=1) if outputs else x
    return y.to(x_BTD.dtype), state.to(x_BTD.dtype)
