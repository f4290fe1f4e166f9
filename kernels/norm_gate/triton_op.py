"""The normalised and gated rows' Triton kernels as a custom operator with gradients, opaque to torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.linear_attention.triton_common import last_dense
from linearize.kernels.norm_gate.triton_rows import Form, norm_gate_backward, norm_gate_forward

_ARGUMENTS = "Tensor x, Tensor? weight, Tensor? gate"
_FORM = "bool gate_first, bool swish, float eps"


@torch.library.custom_op("linearize::norm_gate", mutates_args=(), schema=f"({_ARGUMENTS}, {_FORM}) -> Tensor")
def _op(x: Tensor, weight: Tensor | None, gate: Tensor | None, gate_first: bool, swish: bool, eps: float) -> Tensor:
    with on_device(x):
        return norm_gate_forward(x, weight, gate, Form(gate_first, swish, eps))


@_op.register_fake
def _(x: Tensor, weight: Tensor | None, gate: Tensor | None, gate_first: bool, swish: bool, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "linearize::norm_gate_backward",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor dy, {_FORM}) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, dy: Tensor, gate_first: bool, swish: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    with on_device(x):
        return norm_gate_backward(x, weight, gate, dy, Form(gate_first, swish, eps))


@_backward_op.register_fake
def _(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, dy: Tensor, gate_first: bool, swish: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dgate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return x.new_empty(x.shape), dgate, x.new_empty(x.shape[1:], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, gate, *ctx.form = inputs
    ctx.save_for_backward(x, weight, gate)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, gate = ctx.saved_tensors
    dx, dgate, dweight = _backward_op(x, weight, gate, dy.contiguous(), *ctx.form)
    return dx, None if weight is None else dweight, None if gate is None else dgate, None, None, None


_op.register_autograd(_differentiate, setup_context=_save)


def norm_gate_triton(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, *, gate_first: bool, swish: bool, eps: float
) -> Tensor:
    """Same arguments and results as `norm_gate_reference`."""
    heads = x.shape[-2] if weight is not None and weight.dim() == 2 else 1
    V = x.shape[-1]
    rows = last_dense(x.reshape(-1, heads, V))
    gates = None if gate is None else last_dense(gate.reshape(-1, heads, V))
    gain = None if weight is None else weight.float().reshape(heads, V).contiguous()
    return _op(rows, gain, gates, gate_first, swish, eps).view(x.shape)
