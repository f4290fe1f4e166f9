"""The short convolution's Triton passes as one differentiable operator, opaque to torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.short_conv.triton_conv import Sequences, backward, forward

# None is passed out of an operator as an empty tensor.


@torch.library.custom_op(
    "linearize::short_conv",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? start, bool silu, Tensor? cu_seqlens) -> Tensor",
)
def _forward_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, start: Tensor | None, silu: bool, cu_seqlens: Tensor | None
) -> Tensor:
    with on_device(x):
        return forward(x, weight, bias, start, silu, Sequences(x.shape[1], cu_seqlens))


@_forward_op.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, start: Tensor | None, silu: bool, cu_seqlens: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "linearize::short_conv_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? start, bool silu, Tensor? cu_seqlens, Tensor dy, "
    "bool want_dx, bool want_dstart) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    start: Tensor | None,
    silu: bool,
    cu_seqlens: Tensor | None,
    dy: Tensor,
    want_dx: bool,
    want_dstart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with on_device(x):
        sequences = Sequences(x.shape[1], cu_seqlens)
        dx, dw, dbias, dstart = backward(x, weight, bias, start, silu, sequences, dy, want_dx, want_dstart)
    no_state = x.new_empty(0, dtype=torch.float32)
    return x.new_empty(0) if dx is None else dx, dw, dbias, no_state if dstart is None else dstart


@_backward_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    start: Tensor | None,
    silu: bool,
    cu_seqlens: Tensor | None,
    dy: Tensor,
    want_dx: bool,
    want_dstart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    no_state = x.new_empty(0, dtype=torch.float32)
    dstart = torch.empty_like(start) if start is not None and want_dstart else no_state
    dx = x.new_empty(x.shape if want_dx else 0)
    return dx, torch.empty_like(weight), weight.new_empty(weight.shape[0]), dstart


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, start, ctx.silu, cu_seqlens = inputs
    ctx.save_for_backward(x, weight, bias, start, cu_seqlens)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, start, cu_seqlens = ctx.saved_tensors
    want_dx, want_dstart = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    dx, dw, dbias, dstart = _backward_op(x, weight, bias, start, ctx.silu, cu_seqlens, dy, want_dx, want_dstart)
    dbias = dbias if bias is not None else None
    return dx if want_dx else None, dw, dbias, dstart if want_dstart else None, None, None


_forward_op.register_autograd(_differentiate, setup_context=_save)


def short_conv_triton(
    x_BTD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None = None,
    activation: str | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `short_conv_reference`."""
    weight, bias, start = (None if p is None else p.float().contiguous() for p in (weight_DW, bias_D, initial_state))
    assert weight is not None
    y = _forward_op(x_BTD, weight, bias, start, activation == "silu", cu_seqlens)
    return y, _last_inputs(x_BTD, weight_DW.shape[1], initial_state, cu_seqlens)


def _last_inputs(x_BTD: Tensor, W: int, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The last W − 1 inputs of each sequence, those of its state among them where it is shorter."""
    if cu_seqlens is None:
        B, T, D = x_BTD.shape
        if T >= W - 1:
            return x_BTD[:, T - W + 1 :].clone()
        state = x_BTD.new_zeros(B, W - 1, D) if initial_state is None else initial_state.to(x_BTD.dtype)
        return torch.cat([state[:, T:], x_BTD], 1)
    first, stop = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    place = stop - (W - 1) + torch.arange(W - 1, device=x_BTD.device)
    inside = (place >= first)[..., None]
    last = torch.where(inside, x_BTD[0][place.clamp_min(0)], 0)
    if initial_state is None:
        return last
    lag = (place - first + W - 1).clamp(0, max(W - 2, 0))
    before = initial_state.gather(1, lag[..., None].expand(-1, -1, x_BTD.shape[2]))
    return torch.where(inside, last, before.to(x_BTD.dtype))
