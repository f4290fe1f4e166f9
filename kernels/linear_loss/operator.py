"""The chunks of tokens, one after the other, as a custom operator with gradients, opaque to torch.compile.

The gradients are known as soon as the losses are, so the forward pass makes both and the backward pass only scales
them. Per chunk there are the head's product(s), one elementwise pass and the gradients' products: for a frozen head
three matrix products in all with a teacher. Tiling the vocabulary too would mean making each product a second
time, two more of three at 6·10¹¹ operations each for 8192 tokens, width 2048 and 128,256 entries (some 11 ms on a
GPU of 776 TFLOP/s), to save writing and reading 16-bit products of a chunk (some 3.4 ms at 4.3 TB/s).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.linear_loss.chunked import turn as turn_in_torch
from linearize.kernels.linear_loss.terms import Terms, wide_dtype

Head = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states [N, D], weight [vocab, D] and bias [vocab] or None."""

_WEIGHT_ROWS = 8192
"""Rows of a weight's gradient added at a time, so that the 16-bit products added stay small."""


def _products(head: Head, part: slice, buffer: Tensor) -> Tensor:
    hidden, weight, bias = head
    rows = hidden[part]
    out = buffer[: rows.shape[0], : weight.shape[0]]
    return torch.mm(rows, weight.T, out=out) if bias is None else torch.addmm(bias, rows, weight.T, out=out)


def _buffer(head: Head, chunk: int) -> Tensor:
    hidden, weight, _ = head
    # Rows that start aligned keep the matrix units fast; a CPU wants them dense.
    width = weight.shape[0] if hidden.device.type == "cpu" else -(-weight.shape[0] // 64) * 64
    return hidden.new_empty(min(chunk, hidden.shape[0]), width)


def _add_weight_gradient(total_VD: Tensor, slope_CV: Tensor, hidden_CD: Tensor) -> None:
    if slope_CV.dtype == total_VD.dtype:
        total_VD.addmm_(slope_CV.T, hidden_CD)
        return
    # A sum over a chunk may leave float16's range.
    dtype = torch.float32 if slope_CV.dtype == torch.float16 else slope_CV.dtype
    hidden_CD = hidden_CD.to(dtype)
    for start in range(0, total_VD.shape[0], _WEIGHT_ROWS):
        rows = slice(start, start + _WEIGHT_ROWS)
        total_VD[rows] += slope_CV[:, rows].to(dtype).T @ hidden_CD


def _run(
    student: Head,
    teacher: Head | None,
    labels: Tensor | None,
    terms: Terms,
    chunk: int,
    triton: bool,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, ...]:
    turn = turn_in_torch
    if triton:
        from linearize.kernels.linear_loss.triton_turn import turn as turn_in_triton

        turn = turn_in_triton
    hidden, weight, _ = student
    N, wide = hidden.shape[0], wide_dtype(hidden.dtype)
    ce, kl = hidden.new_zeros(2, N, dtype=wide).unbind()
    dhidden = torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=wide) if wanted[1] else hidden.new_empty(0, dtype=wide)
    dbias = weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=wide)
    buffer = _buffer(student, chunk)
    teacher_buffer = None if teacher is None else _buffer(teacher, chunk)
    for start in range(0, N, chunk):
        part = slice(start, start + chunk)
        slope = _products(student, part, buffer)
        other = None if teacher is None or teacher_buffer is None else _products(teacher, part, teacher_buffer)
        turn(slope, other, None if labels is None else labels[part], ce[part], kl[part], terms, any(wanted))
        if wanted[0]:
            torch.mm(slope, weight, out=dhidden[part])
        if wanted[1]:
            _add_weight_gradient(dweight, slope, hidden[part])
        if wanted[2]:
            dbias += slope.sum(0, dtype=wide)
    tokens = hidden.new_full((), N, dtype=wide)
    if labels is not None:
        counted = labels != terms.ignore_index
        ce, kl = (x.masked_fill(~counted, 0) for x in (ce, kl))
        tokens = counted.sum(dtype=wide)
    ce_sum, kl_sum = ce.sum(), kl.sum()
    loss = terms.ce_weight * ce_sum + terms.kl_weight * kl_sum
    return loss, ce_sum, kl_sum, tokens, dhidden, dweight, dbias


_SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor? teacher_hidden, Tensor? teacher_weight, "
    "Tensor? teacher_bias, Tensor? labels, float ce_weight, float kl_weight, bool reverse, float temperature, "
    "float scale, float softcap, int ignore_index, int chunk, bool triton, bool want_hidden, bool want_weight, "
    "bool want_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("linearize::linear_loss", mutates_args=(), schema=_SCHEMA)
def _op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    labels: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    *terms, chunk, triton, want_hidden, want_weight, want_bias = options
    teacher = None
    if teacher_hidden is not None and teacher_weight is not None:
        teacher = (teacher_hidden, teacher_weight, teacher_bias)
    wanted = (want_hidden, want_weight, want_bias)
    with on_device(hidden):
        return _run((hidden, weight, bias), teacher, labels, Terms(*terms), chunk, triton, wanted)


@_op.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    want_hidden, want_weight, want_bias = rest[-3:]
    wide = wide_dtype(hidden.dtype)
    sums = (hidden.new_empty((), dtype=wide) for _ in range(4))
    dhidden = torch.empty_like(hidden) if want_hidden else hidden.new_empty(0)
    dweight = torch.empty_like(weight, dtype=wide) if want_weight else hidden.new_empty(0, dtype=wide)
    return *sums, dhidden, dweight, weight.new_empty(weight.shape[0] if want_bias else 0, dtype=wide)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted = inputs[-3:]
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.inputs = len(inputs)
    ctx.save_for_backward(*output[4:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(other is not None for other in others):
        raise RuntimeError("linear_loss: only the loss is differentiable, and only once")
    found: list[Tensor | None] = [None] * ctx.inputs
    if grad is not None:
        for i, (wanted, ready, dtype) in enumerate(zip(ctx.wanted, ctx.saved_tensors, ctx.dtypes, strict=True)):
            if wanted:
                found[i] = (ready * grad).to(dtype)
    return tuple(found)


_op.register_autograd(_differentiate, setup_context=_save)


def linear_loss_chunked(
    student: Head, teacher: Head | None, labels: Tensor | None, terms: Terms, chunk: int, *, triton: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over the counted tokens: of the loss, of CE and of KL; and their number."""
    trains = torch.is_grad_enabled()
    wanted = (trains and x is not None and x.requires_grad for x in student)
    loss, *rest = _op(
        *student,
        *(teacher or (None, None, None)),
        labels,
        terms.ce_weight,
        terms.kl_weight,
        terms.reverse,
        terms.temperature,
        terms.scale,
        terms.softcap,
        terms.ignore_index,
        chunk,
        triton,
        *wanted,
    )
    ce, kl, tokens = (x.detach() for x in rest[:3])
    return loss, ce, kl, tokens
