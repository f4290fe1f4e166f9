"""The gates' Triton kernels as custom operators with gradients, opaque to torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.gate_prep.triton_ddts import ddts_backward, ddts_forward
from linearize.kernels.gate_prep.triton_softplus import softplus_backward, softplus_forward
from linearize.kernels.linear_attention.triton_common import last_dense

_DDTS = "Tensor a, Tensor b, Tensor k, Tensor? a_bias, Tensor? b_bias"
_SOFTPLUS = "Tensor x, Tensor A_log, Tensor? bias"


@torch.library.custom_op(
    "linearize::ddts_gates", mutates_args=(), schema=f"({_DDTS}, bool silu, float eps) -> (Tensor, Tensor)"
)
def _ddts_op(
    a: Tensor, b: Tensor, k: Tensor, a_bias: Tensor | None, b_bias: Tensor | None, silu: bool, eps: float
) -> tuple[Tensor, Tensor]:
    with on_device(k):
        return ddts_forward(a, b, k, a_bias, b_bias, silu, eps)


@_ddts_op.register_fake
def _(
    a: Tensor, b: Tensor, k: Tensor, a_bias: Tensor | None, b_bias: Tensor | None, silu: bool, eps: float
) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape, dtype=torch.float32), k.new_empty(k.shape)


@torch.library.custom_op(
    "linearize::ddts_gates_backward",
    mutates_args=(),
    schema=f"({_DDTS}, Tensor ddecay, Tensor dkey, bool silu, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _ddts_backward_op(
    a: Tensor,
    b: Tensor,
    k: Tensor,
    a_bias: Tensor | None,
    b_bias: Tensor | None,
    ddecay: Tensor,
    dkey: Tensor,
    silu: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with on_device(k):
        return ddts_backward(a, b, k, a_bias, b_bias, ddecay, dkey, silu, eps)


@_ddts_backward_op.register_fake
def _(
    a: Tensor,
    b: Tensor,
    k: Tensor,
    a_bias: Tensor | None,
    b_bias: Tensor | None,
    ddecay: Tensor,
    dkey: Tensor,
    silu: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    da, db, dk = (x.new_empty(x.shape) for x in (a, b, k))
    return da, db, dk, k.new_empty((2, *k.shape[1:]), dtype=torch.float32)


def _save_ddts(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.silu, ctx.eps = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate_ddts(ctx: Any, ddecay: Tensor | None, dkey: Tensor | None) -> tuple[Tensor | None, ...]:
    a, b, k, a_bias, b_bias = ctx.saved_tensors
    ddecay = torch.zeros(k.shape, dtype=torch.float32, device=k.device) if ddecay is None else ddecay.contiguous()
    dkey = torch.zeros(k.shape, dtype=k.dtype, device=k.device) if dkey is None else dkey.contiguous()
    da, db, dk, biases = _ddts_backward_op(a, b, k, a_bias, b_bias, ddecay, dkey, ctx.silu, ctx.eps)
    return da, db, dk, None if a_bias is None else biases[0], None if b_bias is None else biases[1], None, None


_ddts_op.register_autograd(_differentiate_ddts, setup_context=_save_ddts)


@torch.library.custom_op("linearize::softplus_gate", mutates_args=(), schema=f"({_SOFTPLUS}) -> (Tensor, Tensor)")
def _softplus_op(x: Tensor, A_log: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    with on_device(x):
        return softplus_forward(x, A_log, bias)


@_softplus_op.register_fake
def _(x: Tensor, A_log: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float32), x.new_empty(x.shape, dtype=torch.float32)


@torch.library.custom_op(
    "linearize::softplus_gate_backward",
    mutates_args=(),
    schema=f"({_SOFTPLUS}, Tensor? ddecay, Tensor? dstep) -> (Tensor, Tensor)",
)
def _softplus_backward_op(
    x: Tensor, A_log: Tensor, bias: Tensor | None, ddecay: Tensor | None, dstep: Tensor | None
) -> tuple[Tensor, Tensor]:
    with on_device(x):
        return softplus_backward(x, A_log, bias, ddecay, dstep)


@_softplus_backward_op.register_fake
def _(
    x: Tensor, A_log: Tensor, bias: Tensor | None, ddecay: Tensor | None, dstep: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((2, x.shape[1]), dtype=torch.float32)


def _save_softplus(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _differentiate_softplus(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    x, A_log, bias = ctx.saved_tensors
    ddecay, dstep = (None if g is None else g.contiguous() for g in gradients)
    dx, sums = _softplus_backward_op(x, A_log, bias, ddecay, dstep)
    return dx, sums[0], None if bias is None else sums[1]


_softplus_op.register_autograd(_differentiate_softplus, setup_context=_save_softplus)


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _flat(x: Tensor) -> Tensor:
    return x.float().flatten().contiguous()


def ddts_gates_triton(
    a_BTHK: Tensor,
    b_BTHK: Tensor,
    k_BTHK: Tensor,
    a_bias_HK: Tensor | None,
    b_bias_HK: Tensor | None,
    silu: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `ddts_gates_reference`."""
    a, b, k = (last_dense(x.flatten(0, 1)) for x in (a_BTHK, b_BTHK, k_BTHK))
    decay, key = _ddts_op(a, b, k, _float(a_bias_HK), _float(b_bias_HK), silu, eps)
    return decay.view(k_BTHK.shape), key.view(k_BTHK.shape)


def softplus_gate_triton(x: Tensor, A_log: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `softplus_gate_reference`."""
    rows = last_dense(x.flatten(2).flatten(0, 1))
    decay, step = _softplus_op(rows, _flat(A_log), None if bias is None else _flat(bias))
    return decay.view(x.shape), step.view(x.shape)
