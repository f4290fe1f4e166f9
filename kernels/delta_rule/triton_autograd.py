"""The delta rule's Triton passes as one differentiable operator.

The forward pass keeps only its inputs. The backward pass prepares the chunks again, walks them forward for the errors
and the states that chunks start from (in the operands' dtype), walks them backward for dv and the states' gradients,
and finishes all chunks at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.delta_rule.triton_finish import finish
from linearize.kernels.delta_rule.triton_prepare import Prepared
from linearize.kernels.delta_rule.triton_scan import scan, scan_back
from linearize.kernels.dispatch import on_device
from linearize.kernels.linear_attention.triton_common import Packing, last_dense, operand_dtype

# The passes are custom operators, opaque to torch.compile; None is passed out of them as an empty tensor.


@torch.library.custom_op(
    "linearize::delta_rule",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? start, float scale, Tensor? cu_seqlens, "
    "bool want_end) -> (Tensor, Tensor)",
)
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    start: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    want_end: bool,
) -> tuple[Tensor, Tensor]:
    (B, T, H, K), V = q.shape, v.shape[3]
    with on_device(q):
        packing = Packing(B, T, cu_seqlens)
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        end = q.new_empty((packing.sequences, H, K, V) if want_end else (0,), dtype=torch.float32)
        ready = Prepared(packing, q, k, v, beta, g, scale, keep=False)
        scan(packing, ready, beta, g, start, o=o, end=end if want_end else None)
    return o, end


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    start: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    want_end: bool,
) -> tuple[Tensor, Tensor]:
    B, _, H, K = q.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    end = q.new_empty((N, H, K, v.shape[3]) if want_end else (0,), dtype=torch.float32)
    return torch.empty_like(v, memory_format=torch.contiguous_format), end


@torch.library.custom_op(
    "linearize::delta_rule_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? start, Tensor do, Tensor? dend, "
    "float scale, Tensor? cu_seqlens, bool want_dg, bool want_dstart) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    start: Tensor | None,
    do: Tensor,
    dend: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    want_dg: bool,
    want_dstart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, T, H, K), V = q.shape, v.shape[3]
    with on_device(q):
        packing = Packing(B, T, cu_seqlens)
        ready = Prepared(packing, q, k, v, beta, g, scale, keep=True)
        errors, dv = (torch.empty_like(v, memory_format=torch.contiguous_format) for _ in range(2))
        states, dstates = (q.new_empty(packing.chunks, H, K, V) for _ in range(2))
        dstart = q.new_empty((packing.sequences, H, K, V) if want_dstart else (0,), dtype=torch.float32)
        scan(packing, ready, beta, g, start, errors=errors, states=states)
        first = dstart if want_dstart else None
        scan_back(packing, ready, beta, g, do, dend, dv=dv, dstates=dstates, dstart=first)
        del ready
        dq, dk, dbeta, dg = finish(packing, q, k, beta, g, scale, errors, do, dv, states, dstates, want_dg)
    return dq, dk, dv, dbeta, q.new_empty(0, dtype=torch.float32) if dg is None else dg, dstart


@_backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    start: Tensor | None,
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
    dbeta = q.new_empty((B, T, H), dtype=torch.float32)
    dg = q.new_empty(g.shape if g is not None and want_dg else (0,), dtype=torch.float32)
    return dq, dk, dv, dbeta, dg, q.new_empty((N, H, K, v.shape[3]) if want_dstart else (0,), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, beta, g, start, ctx.scale, cu_seqlens, ctx.want_end = inputs
    ctx.save_for_backward(q, k, v, beta, g, start, cu_seqlens)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dend: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, beta, g, start, cu_seqlens = ctx.saved_tensors
    do = torch.zeros_like(v, memory_format=torch.contiguous_format) if do is None else last_dense(do)
    want_dg, want_dstart = g is not None and ctx.needs_input_grad[4], ctx.needs_input_grad[5]
    dend = dend if ctx.want_end else None
    dq, dk, dv, dbeta, dg, dstart = _backward_op(
        q, k, v, beta, g, start, do, dend, ctx.scale, cu_seqlens, want_dg, want_dstart
    )
    return dq, dk, dv, dbeta, dg if want_dg else None, dstart if want_dstart else None, None, None, None


_forward_op.register_autograd(_differentiate, setup_context=_save)


def delta_rule_triton(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Same arguments and results as `delta_rule_reference`; the final state only when asked for."""
    scale = q_BTHK.shape[-1] ** -0.5 if scale is None else float(scale)
    dtype = operand_dtype(q_BTHK, k_BTHK, v_BTHV)
    if torch.is_autocast_enabled(q_BTHK.device.type):
        dtype = torch.get_autocast_dtype(q_BTHK.device.type)
    q, k, v = (last_dense(x.to(dtype)) for x in (q_BTHK, k_BTHK, v_BTHV))
    g = None if log_decay is None else log_decay.float()
    start = None if initial_state is None else initial_state.float()
    o, end = _forward_op(q, k, v, beta_BTH.float(), g, start, scale, cu_seqlens, output_final_state)
    return o.to(v_BTHV.dtype), end if output_final_state else None
