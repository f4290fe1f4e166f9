"""The Triton gated scan as a custom operator with gradients, opaque to torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.gated_scan.triton_scan import scan_backward, scan_forward
from linearize.kernels.linear_attention.triton_common import last_dense

# None is passed out of an operator as an empty tensor.


@torch.library.custom_op(
    "linearize::gated_scan",
    mutates_args=(),
    schema="(Tensor x, Tensor g, Tensor? start, Tensor? leads, int chunk, int lead, bool want_end) -> (Tensor, Tensor)",
)
def _forward_op(
    x: Tensor, g: Tensor, start: Tensor | None, leads: Tensor | None, chunk: int, lead: int, want_end: bool
) -> tuple[Tensor, Tensor]:
    with on_device(x):
        y, end = scan_forward(x, g, start, chunk, lead if leads is None else leads, want_end)
    return y, x.new_empty(0, dtype=torch.float32) if end is None else end


@_forward_op.register_fake
def _(
    x: Tensor, g: Tensor, start: Tensor | None, leads: Tensor | None, chunk: int, lead: int, want_end: bool
) -> tuple[Tensor, Tensor]:
    B, T, heads, D = x.shape
    H = max(heads, g.shape[2])
    end = x.new_empty((B, H, D) if want_end else (0,), dtype=torch.float32)
    return x.new_empty(B, T, H, D), end


@torch.library.custom_op(
    "linearize::gated_scan_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor g, Tensor y, Tensor? start, Tensor? leads, Tensor dy, Tensor? dend, int chunk, int lead) "
    "-> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    x: Tensor,
    g: Tensor,
    y: Tensor,
    start: Tensor | None,
    leads: Tensor | None,
    dy: Tensor,
    dend: Tensor | None,
    chunk: int,
    lead: int,
) -> tuple[Tensor, Tensor, Tensor]:
    with on_device(x):
        dx, dg, dstart = scan_backward(x, g, y, start, dy, dend, chunk, lead if leads is None else leads)
    return dx, dg, x.new_empty(0, dtype=torch.float32) if dstart is None else dstart


@_backward_op.register_fake
def _(
    x: Tensor,
    g: Tensor,
    y: Tensor,
    start: Tensor | None,
    leads: Tensor | None,
    dy: Tensor,
    dend: Tensor | None,
    chunk: int,
    lead: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dstart = x.new_empty((0,), dtype=torch.float32) if start is None else torch.empty_like(start)
    return x.new_empty(x.shape), g.new_empty(g.shape), dstart


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, g, start, leads, ctx.chunk, ctx.lead, ctx.want_end = inputs
    ctx.save_for_backward(x, g, start, leads, output[0])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, dend: Tensor | None) -> tuple[Tensor | None, ...]:
    x, g, start, leads, y = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else last_dense(dy)
    dend = dend.contiguous() if dend is not None and ctx.want_end else None
    dx, dg, dstart = _backward_op(x, g, y, start, leads, dy, dend, ctx.chunk, ctx.lead)
    return dx, dg, None if start is None else dstart, None, None, None, None


_forward_op.register_autograd(_differentiate, setup_context=_save)


def scan(
    x_BTHD: Tensor,
    gate_BTHD: Tensor,
    chunk: int,
    *,
    lead: int | Tensor = 0,
    start: Tensor | None = None,
    want_end: bool,
) -> tuple[Tensor, Tensor | None]:
    """y [B,T,H,D] and the last state [B,H,D]; of the heads of x and gate, one is a multiple of the other.

    `chunk` is 0 without resets; the first step stands at `lead` in its chunk (of each row if [B]), and `start` is read
    only where it does not start one.
    """
    leads = None
    if isinstance(lead, Tensor):
        if start is not None:
            start = start.masked_fill((lead == 0)[:, None, None], 0.0)
        leads, lead = lead.to(torch.int32).contiguous(), 0
    elif chunk > 0 and lead == 0:
        start = None
    if start is not None:
        start = start.float().contiguous()
    y, end = _forward_op(last_dense(x_BTHD), last_dense(gate_BTHD), start, leads, chunk, lead, want_end)
    return y, end if want_end else None


def gated_scan_triton(
    x: Tensor,
    gate: Tensor,
    chunk_size: int | None = None,
    *,
    position: int | Tensor = 0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Same arguments and results as `gated_scan_reference`; the last state only when asked for."""
    three = x.dim() == 3
    if three:
        x, gate = x[:, :, None], gate[:, :, None]
        initial_state = None if initial_state is None else initial_state[:, None]
    chunk = 0 if chunk_size is None else chunk_size
    lead = position % chunk if chunk else 0
    y, end = scan(x, gate, chunk, lead=lead, start=initial_state, want_end=output_final_state)
    return (y[:, :, 0], end if end is None else end[:, 0]) if three else (y, end)
