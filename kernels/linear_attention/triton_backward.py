"""Linear attention on the GPU: gradients.

With no decay or one per token, each gradient is again a linear attention with other roles, so three scans give all:

    dq from (do, v, k) forward in time,  dk from (v, do, q) and dv from (k, q, do) backward in time

and the log decay's gradient is a cumulative sum of Σ_d q dq − k dk, the terms j = i left out since they cancel. With a
decay per channel (or wide values) two scans write the states S and their gradients dS that every chunk starts from (in
the operands' dtype), and `finish` turns them into gradients.
"""

# ruff: noqa: SIM108  (branches on compile-time constants read and compile best as statements)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.linear_attention import launch as table
from linearize.kernels.linear_attention.launch import CHUNK
from linearize.kernels.linear_attention.triton_common import Packing, per_channel
from linearize.kernels.linear_attention.triton_finish import finish
from linearize.kernels.linear_attention.triton_prepare import prepare
from linearize.kernels.linear_attention.triton_scan import scan
from linearize.kernels.linear_attention.triton_segments import segment_states
from linearize.kernels.linear_attention.triton_tiles import VANISHED

WIDEST_CONTRACTION = 256  # values wider than this don't fit the role of a state's rows


@triton.jit(do_not_specialize=["T", "H", "block_stride", "part_stride", "g_b", "g_t", "g_h"])
def _decay_gradient(
    x_ptr,
    y_ptr,
    g_ptr,
    at_end_ptr,
    dg_ptr,
    cu_ptr,
    T,
    H,
    block_stride,
    part_stride,
    g_b,
    g_t,
    g_h,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_END: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """The gradient [B,T,H] of a log decay per token, from the row products of `_scan` for dq (x) and dk (y).

    `crossing` is what pairs before and after a chunk have together. Known at the sequence's end, it follows
    backwards
    from chunk to chunk, and is 0 where a chunk decays all: that keeps large sums from standing in for tiny
    ones.
    """
    nh = tl.program_id(0)
    n = (nh // H).to(tl.int64)
    h = (nh % H).to(tl.int64)
    if VARLEN:
        first_row = tl.load(cu_ptr + n).to(tl.int64)
        length = (tl.load(cu_ptr + n + 1).to(tl.int64) - first_row).to(tl.int32)
        batch = n * 0
    else:
        first_row = n * 0
        length = T
        batch = n
    row = tl.arange(0, CHUNK)
    count = tl.cdiv(length, CHUNK)
    if AT_END:
        crossing = tl.load(at_end_ptr + nh).to(tl.float32)
    else:
        crossing = 0.0
    for i in range(0, count):
        t = (count - 1 - i) * CHUNK + row
        ok = t < length
        t64 = first_row + t
        dots = (batch * H + h) * T + t64
        inside = tl.zeros([CHUNK], tl.float32)
        before = tl.zeros([CHUNK], tl.float32)
        after = tl.zeros([CHUNK], tl.float32)
        for block in tl.static_range(BLOCKS):
            here = dots + block * block_stride
            inside += tl.load(x_ptr + here, mask=ok, other=0.0) - tl.load(y_ptr + here, mask=ok, other=0.0)
            before += tl.load(x_ptr + here + part_stride, mask=ok, other=0.0)
            after += tl.load(y_ptr + here + part_stride, mask=ok, other=0.0)
        g = tl.load(g_ptr + batch * g_b + h * g_h + t64 * g_t, mask=ok, other=0.0)
        crossing = crossing - tl.sum(after, 0)
        crossing = tl.where(tl.sum(g, 0) > -17.0, crossing, 0.0)  # e^-17 is float32's last digit
        last = (row == CHUNK - 1) | (t == length - 1)
        after = tl.where(last, 0.0, after)
        dg = tl.cumsum(inside + before, 0, reverse=True) + (tl.cumsum(after, 0) - after) + crossing
        dg = tl.where(g < VANISHED, 0.0, dg)
        tl.store(dg_ptr + (batch * T + t64) * H + h, dg, mask=ok)
        crossing += tl.sum(before, 0)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    bonus: Tensor | None,
    scale: float,
    start: Tensor | None,
    end: Tensor | None,
    segment_starts: Tensor | None,
    packing: Packing,
    do: Tensor,
    dend: Tensor | None,
    want_dg: bool,
    want_dstart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv, dg (like per-token or per-channel g), dbonus, dstart; arguments as `forward` had them."""
    per_token = bonus is None and (g is None or g.dim() == 3)
    if per_token and v.shape[3] <= WIDEST_CONTRACTION:
        return _by_roles(q, k, v, g, scale, start, end, segment_starts, packing, do, dend, want_dg, want_dstart)
    return _by_states(q, k, v, g, bonus, scale, start, segment_starts, packing, do, dend, want_dg, want_dstart)


def _by_roles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    start: Tensor | None,
    end: Tensor | None,
    segment_starts: Tensor | None,
    packing: Packing,
    do: Tensor,
    dend: Tensor | None,
    want_dg: bool,
    want_dstart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, Tensor | None]:
    (B, T, H, K), V = q.shape, v.shape[3]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dstart = q.new_empty(packing.sequences, H, K, V, dtype=torch.float32) if want_dstart else None
    count = 1 if segment_starts is None else segment_starts.shape[2]
    # dS is scaled only on its way out, so what enters is divided by the scale first.
    inverse = 1.0 / scale if scale != 0 else 0.0
    dstates, dstate_scale = dend, inverse
    if count > 1:
        start = segment_starts
        dstates = segment_states(
            packing,
            q,
            do,
            segments=count,
            log_decay=g,
            start=dend,
            end=dstart,
            reverse=True,
            start_scale=inverse,
        )
        dstate_scale = 1.0
        if dstart is not None:
            dstart.mul_(scale)
    x = y = None
    if want_dg:
        blocks = triton.cdiv(K, table.scan_launch(V, K, q.dtype.itemsize, per_token=True).block)
        x, y = (torch.empty(blocks, 2, B, H, T, dtype=torch.float32, device=q.device) for _ in range(2))
    scan(
        packing,
        do,
        v,
        k,
        out=dq,
        log_decay=g,
        extra=q if want_dg else None,
        rowdot=x,
        start=None if start is None else start.mT,
        segments=count,
        scale=scale,
    )
    scan(
        packing,
        v,
        do,
        q,
        out=dk,
        log_decay=g,
        extra=k if want_dg else None,
        rowdot=y,
        start=None if dstates is None else dstates.mT,
        start_scale=dstate_scale,
        segments=count,
        reverse=True,
        scale=scale,
    )
    scan(
        packing,
        k,
        q,
        do,
        out=dv,
        log_decay=g,
        start=dstates,
        start_scale=dstate_scale,
        end=dstart if count == 1 else None,
        end_scale=scale,
        segments=count,
        reverse=True,
        scale=scale,
    )
    dg = None if x is None or y is None or g is None else _token_decay_gradient(x, y, g, end, dend, packing)
    return dq, dk, dv, dg, None, dstart


def _token_decay_gradient(
    x: Tensor, y: Tensor, g: Tensor, end: Tensor | None, dend: Tensor | None, packing: Packing
) -> Tensor:
    _, _, B, H, T = x.shape
    at_end = None if dend is None or end is None else (end * dend).sum((2, 3))
    dg = torch.empty(B, T, H, dtype=torch.float32, device=x.device)
    _decay_gradient[(packing.sequences * H,)](
        x,
        y,
        g,
        at_end,
        dg,
        packing.cu,
        T,
        H,
        *x.stride()[:2],
        *g.stride(),
        BLOCKS=x.shape[0],
        CHUNK=CHUNK,
        AT_END=at_end is not None,
        VARLEN=packing.varlen,
        num_warps=1,
        num_stages=2,
    )
    return dg


def _by_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    bonus: Tensor | None,
    scale: float,
    start: Tensor | None,
    segment_starts: Tensor | None,
    packing: Packing,
    do: Tensor,
    dend: Tensor | None,
    want_dg: bool,
    want_dstart: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    H, K, V = q.shape[2], q.shape[3], v.shape[3]
    g_BTHK = per_channel(g, q)
    q_out, k_out, scores, total = prepare(packing, q, k, g_BTHK, bonus, scale)
    dv = torch.empty_like(v, memory_format=torch.contiguous_format)
    states = torch.empty(packing.chunks, H, K, V, dtype=q.dtype, device=q.device)
    dstates = torch.empty_like(states)
    dstart = q.new_empty(packing.sequences, H, K, V, dtype=torch.float32) if want_dstart else None

    count = 1 if segment_starts is None else segment_starts.shape[2]
    first, last, end = start, dend, dstart
    if count > 1:
        first = segment_starts
        last = segment_states(packing, q_out, do, segments=count, total=total, start=dend, end=dstart, reverse=True)
        end = None
    scan(packing, k_out, k_out, v, total=total, start=first, states=states, segments=count)
    scan(
        packing,
        k_out,
        q_out,
        do,
        out=dv,
        scores=scores,
        total=total,
        start=last,
        end=end,
        states=dstates,
        reverse=True,
        segments=count,
    )
    dq, dk, dg, dbonus = finish(packing, q, k, v, g_BTHK, bonus, scale, do, states, dstates, total, want_dg)
    if dg is not None and g is not None and g.dim() == 3:
        dg = dg.sum(-1)
    return dq, dk, dv, dg, dbonus, dstart


# The passes are custom operators, opaque to torch.compile; None is passed out of them as an empty tensor.
