"""The short convolution as a sum of shifted products, in plain torch, differentiable in every input.

With a handful of taps this reads each input a handful of times from the cache and needs no transposed copy,
unlike a convolution over [B, D, T].

Shape suffixes: B batch, T time, D channels, W taps, P = W − 1 + T positions (the state, then the inputs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.packing import gather_group, group_by_length


def short_conv_chunked(
    x_BTD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None = None,
    activation: str | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `short_conv_reference`."""
    if cu_seqlens is not None:
        return _packed(x_BTD, weight_DW, bias_D, activation, initial_state, cu_seqlens)
    x_BPD, y_BTD = _convolve(x_BTD, weight_DW, bias_D, activation, initial_state)
    T = x_BTD.shape[1]
    return y_BTD.to(x_BTD.dtype), x_BPD[:, T:].to(x_BTD.dtype, copy=True)


def _convolve(
    x_BTD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, activation: str | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The state followed by the inputs, [B,P,D], and the outputs [B,T,D], both in the wide dtype."""
    B, _T, D = x_BTD.shape
    W = weight_DW.shape[1]
    dtype = compute_dtype(x_BTD, weight_DW, bias_D, state)
    before = x_BTD.new_zeros(B, W - 1, D, dtype=dtype) if state is None else state.to(dtype)
    x_BPD = torch.cat([before, x_BTD.to(dtype)], dim=1)
    z_BTD = _Taps.apply(x_BPD, weight_DW.to(dtype), None if bias_D is None else bias_D.to(dtype))
    return x_BPD, torch.nn.functional.silu(z_BTD) if activation == "silu" else z_BTD


class _Taps(torch.autograd.Function):
    """x [B,P,D], weight [D,W], bias [D] or None -> [B,T,D]."""

    @staticmethod
    def forward(ctx: Any, x_BPD: Tensor, weight_DW: Tensor, bias_D: Tensor | None) -> Tensor:
        W = weight_DW.shape[1]
        T = x_BPD.shape[1] - W + 1
        z = x_BPD[:, :T] * weight_DW[:, 0]
        for i in range(1, W):
            z.addcmul_(x_BPD[:, i : i + T], weight_DW[:, i])
        if bias_D is not None:
            z += bias_D
        ctx.save_for_backward(x_BPD, weight_DW)
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x_BPD, weight_DW = ctx.saved_tensors
        T = dz.shape[1]
        dx, dweight = torch.zeros_like(x_BPD), torch.empty_like(weight_DW)
        for i in range(weight_DW.shape[1]):
            dx[:, i : i + T].addcmul_(dz, weight_DW[:, i])
            dweight[:, i] = (x_BPD[:, i : i + T] * dz).sum((0, 1))
        return dx, dweight, dz.sum((0, 1)) if ctx.needs_input_grad[2] else None


def _packed(
    x_BTD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sequences laid end to end: similar lengths go together as one batch, padded on the right."""
    N, W, D = cu_seqlens.numel() - 1, weight_DW.shape[1], x_BTD.shape[2]
    final = x_BTD.new_zeros(N, W - 1, D) if initial_state is None else initial_state.to(x_BTD.dtype)
    if x_BTD.numel() == 0:
        return x_BTD.clone(), final
    y_TD = torch.zeros_like(x_BTD[0])
    for group in group_by_length(cu_seqlens):
        state = None if initial_state is None else initial_state[group.sequences]
        x_BPD, y_BTD = _convolve(gather_group(x_BTD, group), weight_DW, bias_D, activation, state)
        y_TD = y_TD.index_put((group.index[group.valid],), y_BTD[group.valid].to(x_BTD.dtype))
        # The last W − 1 positions of each sequence, the state's own among them where it is shorter.
        last = group.valid.sum(1)[:, None] + torch.arange(W - 1, device=x_BTD.device)
        kept = x_BPD.gather(1, last[..., None].expand(-1, -1, D))
        final = final.index_copy(0, group.sequences, kept.to(x_BTD.dtype))
    return y_TD[None], final
