"""Linear attention's Triton passes as one differentiable operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.linear_attention.triton_backward import backward
from linearize.kernels.linear_attention.triton_common import Packing, last_dense, operand_dtype
from linearize.kernels.linear_attention.triton_forward import forward
from linearize.kernels.linear_attention.triton_segments import cuts

# The passes are custom operators, opaque to torch.compile; None is passed out of them as an empty tensor.


@torch.library.custom_op(
    "linearize::linear_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? bonus, Tensor? start, float scale, "
    "Tensor? cu_seqlens, bool want_end) -> (Tensor, Tensor, Tensor)",
)
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    bonus: Tensor | None,
    start: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    want_end: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    with on_device(q):
        packing = Packing(q.shape[0], q.shape[1], cu_seqlens)
        o, end, segment_starts = forward(q, k, v, g, bonus, scale, start, packing, want_end)
    none = q.new_empty(0, dtype=torch.float32)
    return o, none if end is None else end, none.clone() if segment_starts is None else segment_starts


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    bonus: Tensor | None,
    start: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    want_end: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, K = q.shape
    V = v.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    count = cuts(N, T, H, K, V, q, cu_seqlens is not None)
    end = q.new_empty((N, H, K, V) if want_end else (0,), dtype=torch.float32)
    segment_starts = q.new_empty((N, H, count, K, V) if count > 1 else (0,), dtype=torch.float32)
    return torch.empty_like(v, memory_format=torch.contiguous_format), end, segment_starts


@torch.library.custom_op(
    "linearize::linear_attention_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? bonus, Tensor? start, Tensor? end, "
    "Tensor? segment_starts, Tensor do, Tensor? dend, float scale, Tensor? cu_seqlens, bool want_dg, "
    "bool want_dstart) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    bonus: Tensor | None,
    start: Tensor | None,
    end: Tensor | None,
    segment_starts: Tensor | None,
    do: Tensor,
    dend: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    want_dg: bool,
    want_dstart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with on_device(q):
        packing = Packing(q.shape[0], q.shape[1], cu_seqlens)
        dq, dk, dv, *rest = backward(
            q, k, v, g, bonus, scale, start, end, segment_starts, packing, do, dend, want_dg, want_dstart
        )
    dg, dbonus, dstart = (q.new_empty(0, dtype=torch.float32) if x is None else x for x in rest)
    return dq, dk, dv, dg, dbonus, dstart


@_backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    bonus: Tensor | None,
    start: Tensor | None,
    end: Tensor | None,
    segment_starts: Tensor | None,
    do: Tensor,
    dend: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    want_dg: bool,
    want_dstart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, T, H, K = q.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))

    def maybe(wanted: bool, *shape: int) -> Tensor:
        return q.new_empty(shape if wanted else (0,), dtype=torch.float32)

    dg = maybe(want_dg, *((B, T, H) if g is not None and g.dim() == 3 else (B, T, H, K)))
    return dq, dk, dv, dg, maybe(bonus is not None, H, K), maybe(want_dstart, N, H, K, v.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, g, bonus, start, ctx.scale, cu_seqlens, _ = inputs
    _, end, segment_starts = output
    ctx.save_for_backward(q, k, v, g, bonus, start, end, segment_starts, cu_seqlens)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dend: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, g, bonus, start, end, segment_starts, cu_seqlens = ctx.saved_tensors
    do = torch.zeros_like(v, memory_format=torch.contiguous_format) if do is None else last_dense(do)
    want_dg, want_dstart = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    dq, dk, dv, dg, dbonus, dstart = _backward_op(
        q,
        k,
        v,
        g,
        bonus,
        start,
        end if end.numel() > 0 else None,
        segment_starts if segment_starts.numel() > 0 else None,
        do,
        dend if end.numel() > 0 else None,
        ctx.scale,
        cu_seqlens,
        want_dg,
        want_dstart,
    )
    return (
        dq,
        dk,
        dv,
        dg if want_dg else None,
        dbonus if bonus is not None else None,
        dstart if want_dstart else None,
        None,
        None,
        None,
    )


_forward_op.register_autograd(_differentiate, setup_context=_save)


def linear_attention_triton(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay: Tensor | None = None,
    *,
    bonus_HK: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Same arguments and results as `linear_attention_reference`; the final state only when asked for."""
    B, T, H, K = q_BTHK.shape
    scale = K**-0.5 if scale is None else float(scale)
    dtype = operand_dtype(q_BTHK, k_BTHK, v_BTHV)
    if torch.is_autocast_enabled(q_BTHK.device.type):
        dtype = torch.get_autocast_dtype(q_BTHK.device.type)
    q, k, v = (last_dense(x.to(dtype)) for x in (q_BTHK, k_BTHK, v_BTHV))
    g = None if log_decay is None else log_decay.float()
    if g is not None and g.dim() == 1:
        g = g.expand(B, T, H)
    bonus = None if bonus_HK is None else bonus_HK.float().contiguous()
    start = None if initial_state is None else initial_state.float()
    o, end, _ = _forward_op(q, k, v, g, bonus, start, scale, cu_seqlens, output_final_state)
    return o.to(v_BTHV.dtype), end if output_final_state else None
