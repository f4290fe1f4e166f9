"""Linear attention on the GPU: gradients, and the autograd function over both passes.

With no decay or one per token, each gradient is again a linear attention with other roles, so three scans
give all:

    dq from (do, v, k) forward in time,  dk from (v, do, q) and dv from (k, q, do) backward in time

and the log decay's gradient is a cumulative sum of Σ_d q dq − k dk, the terms j = i left out since they
cancel. With a decay per channel (or wide values) two scans write the states S and their gradients dS that
every chunk starts from (in the operands' dtype), and `_finish` turns them into gradients chunk by chunk, all
chunks at once. There a chunk's own part of the log decay's gradient needs no sum over time, so nothing
cancels between chunks:

    dg_t = Σ_{i≥t} x_i − Σ_{j≥t} y_j + Σ_{j<t} z_j + Σ_v S ⊙ decay ⊙ dS

with x_i = q_i ⊙ dq_i, y_j = k_j ⊙ dk_j inside the chunk and z_j = k_j ⊙ dk_j towards later chunks.
"""

# ruff: noqa: SIM102, SIM108  (branches on compile-time constants read and compile best as statements)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from linearize.kernels.dispatch import on_device
from linearize.kernels.linear_attention.launch import CHUNK, finish_launch, scan_launch
from linearize.kernels.linear_attention.triton_forward import (
    _FLOOR,
    _SPAN,
    Packing,
    _centred,
    _find_chunk,
    _halved,
    _log_decays,
    _lower_halves,
    _lower_triangles,
    _put,
    _tile,
    _to_end,
    _weakest,
    _whole,
    cuts,
    dot_precision,
    forward,
    last_dense,
    operand_dtype,
    per_channel,
    prepare,
    scan,
    segment_states,
    wide_dtype,
)
from torch import Tensor

WIDEST_CONTRACTION = 256  # values wider than this don't fit the role of a state's rows


@triton.jit
def _pair_gradients(dscores, q, k, fq, fk, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients through scores = (q fq)(k fk)ᵀ: dq, dk, and x − y of the log decay.

    x and y are made of the same rounded factors, so that pairs which cancel in their sums cancel exactly.
    """
    q_wide = (q.to(tl.float32) * fq).to(WIDE)
    k_wide = (k.to(tl.float32) * fk).to(WIDE)
    ds = dscores.to(WIDE)
    dq = tl.dot(ds, k_wide, input_precision=PRECISION)
    dk = tl.dot(tl.trans(ds), q_wide, input_precision=PRECISION)
    return dq * fq, dk * fk, dq * q_wide.to(tl.float32) - dk * k_wide.to(tl.float32)


@triton.jit(do_not_specialize=["N", "T"])
def _finish(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    u_ptr,
    do_ptr,
    states_ptr,
    dstates_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    du_ptr,
    cu_ptr,
    cu_chunks_ptr,
    N,
    T,
    H: tl.constexpr,
    scale,
    q_b,
    q_t: tl.constexpr,
    q_h,
    k_b,
    k_t: tl.constexpr,
    k_h,
    v_b,
    v_t: tl.constexpr,
    v_h,
    do_b,
    do_t: tl.constexpr,
    do_h,
    g_b,
    g_t: tl.constexpr,
    g_h,
    g_k: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BONUS: tl.constexpr,
    DECAY_GRADIENT: tl.constexpr,
    VARLEN: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq, dk, dg (and the bonus's gradient, per chunk) of K_BLOCK channels of one chunk."""
    EVEN_K: tl.constexpr = K % K_BLOCK == 0
    EVEN_V: tl.constexpr = V % V_BLOCK == 0
    LEVELS: tl.constexpr = 6
    tl.static_assert(CHUNK == 1 << LEVELS)
    blocks: tl.constexpr = (K + K_BLOCK - 1) // K_BLOCK
    block = tl.program_id(0) % blocks
    index = tl.program_id(0) // blocks
    h = tl.program_id(1).to(tl.int64)
    if VARLEN:
        if index >= tl.load(cu_chunks_ptr + N):
            return
    batch, first_row, length, chunk = _find_chunk(index, N, T, cu_ptr, cu_chunks_ptr, CHUNK, VARLEN)
    row = tl.arange(0, CHUNK)
    t = chunk * CHUNK + row
    ok = t < length
    first = first_row + chunk * CHUNK
    ik = block * K_BLOCK + tl.arange(0, K_BLOCK)
    k_ok = ik < K

    do_base = do_ptr + batch * do_b + h * do_h + first * do_t + row[:, None] * do_t
    v_base = v_ptr + batch * v_b + h * v_h + first * v_t + row[:, None] * v_t
    dscores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for v0 in range(0, V, V_BLOCK):
        iv = v0 + tl.arange(0, V_BLOCK)
        v_ok = iv < V
        do = _tile(do_base + iv[None, :], ok, v_ok, EVEN, EVEN_V)
        v = _tile(v_base + iv[None, :], ok, v_ok, EVEN, EVEN_V)
        dscores = tl.dot(do, tl.trans(v), dscores, input_precision=PRECISION)
    own = row[:, None] == row[None, :]
    dscores = dscores * scale
    diagonal = tl.sum(tl.where(own, dscores, 0.0), 1)
    dscores = tl.where(row[:, None] > row[None, :], dscores, 0.0)

    # Pairs inside the chunk.
    q = _tile(
        q_ptr + batch * q_b + h * q_h + first * q_t + (row[:, None] * q_t + ik[None, :]),
        ok,
        k_ok,
        EVEN,
        EVEN_K,
    )
    k = _tile(
        k_ptr + batch * k_b + h * k_h + first * k_t + (row[:, None] * k_t + ik[None, :]),
        ok,
        k_ok,
        EVEN,
        EVEN_K,
    )
    g_spot = g_ptr + batch * g_b + h * g_h + first * g_t + (row[:, None] * g_t + ik[None, :] * g_k)
    g = _tile(g_spot, ok, k_ok, EVEN, EVEN_K)
    g = tl.maximum(g, _FLOOR)
    q_sum, q_low, k_sum, k_low = _log_decays(g, BONUS, EXACT)
    total = tl.sum(g, 0)
    if tl.min(total, 0) > -_SPAN:
        fq, fk = _centred(q_sum, q_low, k_sum, k_low, g, CHUNK, CHUNK, K_BLOCK, EXACT)
        dq, dk, dg = _pair_gradients(dscores, q, k, fq, fk, WIDE, PRECISION)
    else:
        dq = tl.zeros([CHUNK, K_BLOCK], tl.float32)
        dk = tl.zeros([CHUNK, K_BLOCK], tl.float32)
        dg = tl.zeros([CHUNK, K_BLOCK], tl.float32)
        level = 0
        if _weakest(g, 16, CHUNK, K_BLOCK) > -_SPAN:
            fq, fk = _centred(q_sum, q_low, k_sum, k_low, g, 16, CHUNK, K_BLOCK, EXACT)
            part = tl.where(_lower_triangles(row, 16), dscores, 0.0)
            dq, dk, dg = _pair_gradients(part, q, k, fq, fk, WIDE, PRECISION)
            level = 4
        while level < LEVELS:
            fq, fk = _halved(q_sum, q_low, k_sum, k_low, 1 << level, CHUNK, K_BLOCK, EXACT)
            part = tl.where(_lower_halves(row, 1 << level), dscores, 0.0)
            dq_, dk_, dg_ = _pair_gradients(part, q, k, fq, fk, WIDE, PRECISION)
            dq += dq_
            dk += dk_
            dg += dg_
            level += 1

    # Towards the states at the chunk's two ends.
    dq_state = tl.zeros([CHUNK, K_BLOCK], tl.float32)
    dk_state = tl.zeros([CHUNK, K_BLOCK], tl.float32)
    through = tl.zeros([K_BLOCK], tl.float32)
    state_base = (index.to(tl.int64) * H + h) * (K * V) + ik[:, None] * V
    for v0 in range(0, V, V_BLOCK):
        iv = v0 + tl.arange(0, V_BLOCK)
        v_ok = iv < V
        do = _tile(do_base + iv[None, :], ok, v_ok, EVEN, EVEN_V)
        v = _tile(v_base + iv[None, :], ok, v_ok, EVEN, EVEN_V)
        s = _tile(states_ptr + state_base + iv[None, :], k_ok, v_ok, EVEN_K, EVEN_V)
        ds = _tile(dstates_ptr + state_base + iv[None, :], k_ok, v_ok, EVEN_K, EVEN_V)
        dq_state = tl.dot(do, tl.trans(s), dq_state, input_precision=PRECISION)
        dk_state = tl.dot(v, tl.trans(ds), dk_state, input_precision=PRECISION)
        if DECAY_GRADIENT:
            through += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    dq_state = dq_state * tl.exp(_whole(q_sum, q_low, EXACT)) * scale
    dk_state = dk_state * tl.exp(_to_end(k_sum, k_low, g, EXACT))
    dq += dq_state
    dk += dk_state
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    wide = ((batch * T + first) * H + h) * K + (row[:, None] * (H * K) + ik[None, :])
    if DECAY_GRADIENT:
        x = dq_state * q
        # The last row's z counts for nothing here, but is large beside the others when decays are strong.
        last = (row == CHUNK - 1) | (t == length - 1)
        z = tl.where(last[:, None], 0.0, dk_state * k)
        dg = tl.cumsum(dg + x, 0, reverse=True) + tl.cumsum(z, 0) - z + (tl.exp(total) * through)[None, :]
        if BONUS:
            dg -= q * dq
        _put(dg_ptr + wide, dg, ok, k_ok, EVEN, EVEN_K)
    if BONUS:
        u = tl.load(u_ptr + h * K + ik, mask=k_ok, other=0.0)
        du = tl.sum(q * k * diagonal[:, None], 0)
        tl.store(du_ptr + (index.to(tl.int64) * H + h) * K + ik, du, mask=k_ok)
        dq += diagonal[:, None] * k * u[None, :]
        dk += diagonal[:, None] * q * u[None, :]
    else:
        dq += diagonal[:, None] * k
        dk += diagonal[:, None] * q
    _put(dq_ptr + wide, dq.to(dq_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)
    _put(dk_ptr + wide, dk.to(dk_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)


@triton.jit(do_not_specialize=["T", "H"])
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
        tl.store(dg_ptr + (batch * T + t64) * H + h, dg, mask=ok)
        crossing += tl.sum(before, 0)


# --- launching
# -------------------------------------------------------------------------------------------------------


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
        return _by_roles(
            q, k, v, g, scale, start, end, segment_starts, packing, do, dend, want_dg, want_dstart
        )
    return _by_states(
        q, k, v, g, bonus, scale, start, segment_starts, packing, do, dend, want_dg, want_dstart
    )


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
        blocks = triton.cdiv(K, scan_launch(V, K, q.dtype.itemsize).block)
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
    (B, T, H, K), V = q.shape, v.shape[3]
    g_BTHK = per_channel(g, q)
    q_out, k_out, scores, total = prepare(packing, q, k, g_BTHK, bonus, scale)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    states = torch.empty(packing.chunks, H, K, V, dtype=q.dtype, device=q.device)
    dstates = torch.empty_like(states)
    dstart = q.new_empty(packing.sequences, H, K, V, dtype=torch.float32) if want_dstart else None
    dg = torch.empty(B, T, H, K, dtype=torch.float32, device=q.device) if want_dg else None
    du = (
        torch.zeros(packing.chunks, H, K, dtype=torch.float32, device=q.device) if bonus is not None else None
    )

    count = 1 if segment_starts is None else segment_starts.shape[2]
    first, last, end = start, dend, dstart
    if count > 1:
        first = segment_starts
        last = segment_states(
            packing, q_out, do, segments=count, total=total, start=dend, end=dstart, reverse=True
        )
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
    launch, v_block = finish_launch(K, V, q.dtype.itemsize)
    _finish[(packing.chunks * triton.cdiv(K, launch.block), H)](
        q,
        k,
        v,
        g_BTHK,
        bonus,
        do,
        states,
        dstates,
        dq,
        dk,
        dg,
        du,
        packing.cu,
        packing.cu_chunks,
        packing.sequences,
        T,
        H,
        scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *do.stride()[:3],
        *g_BTHK.stride(),
        K=K,
        V=V,
        K_BLOCK=launch.block,
        V_BLOCK=v_block,
        CHUNK=CHUNK,
        BONUS=bonus is not None,
        DECAY_GRADIENT=want_dg,
        VARLEN=packing.varlen,
        EVEN=packing.even,
        EXACT=q.dtype == torch.float32,
        WIDE=wide_dtype(q.dtype),
        PRECISION=dot_precision(q.dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    if dg is not None and g is not None and g.dim() == 3:
        dg = dg.sum(-1)
    return dq, dk, dv, dg, None if du is None else du.sum(0), dstart


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


def _differentiate(
    ctx: Any, do: Tensor | None, dend: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
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
