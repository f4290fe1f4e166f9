"""The chunk-wise scan, which walks a sequence with a block of the state in registers.

Every pass of linear attention, forward and backward, is one or more of these scans (see `_scan`).
"""

# ruff: noqa: SIM102, SIM108  (branches on compile-time constants read and compile best as statements)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels import fitting
from linearize.kernels.linear_attention import launch as table
from linearize.kernels.linear_attention.launch import CHUNK
from linearize.kernels.linear_attention.triton_common import Packing, dot_precision
from linearize.kernels.linear_attention.triton_tiles import FLOOR, difference, load_tile, split_sum, store_tile, whole


# fmt: off
# Strides that vary with the length and say nothing about alignment: without this, other lengths would compile anew.
@triton.jit(
    do_not_specialize=["T", "segments", "chunks_per_segment", "rowdot_stride", "rowdot_part", "g_b", "g_h"]
)
def _scan(
    a_ptr, b_ptr, c_ptr, out_ptr, scores_ptr, decay_ptr, extra_ptr, rowdot_ptr, start_ptr, end_ptr, states_ptr,
    kept_ptr, cu_ptr, cu_chunks_ptr, T, H: tl.constexpr, segments, chunks_per_segment, out_scale, start_scale,
    end_scale, rowdot_stride, rowdot_part, a_b, a_t: tl.constexpr, a_h, b_b, b_t: tl.constexpr, b_h, c_b,
    c_t: tl.constexpr, c_h, o_b, o_t: tl.constexpr, o_h, e_b, e_t: tl.constexpr, e_h, g_b, g_t: tl.constexpr, g_h,
    s_n, s_h, s_a, s_c, s_s, f_n, f_h, f_a, f_c, f_s, A_WIDTH: tl.constexpr, C_WIDTH: tl.constexpr,
    A_BLOCK: tl.constexpr, C_BLOCK: tl.constexpr, CHUNK: tl.constexpr, SCORES: tl.constexpr, DECAY: tl.constexpr,
    REVERSE: tl.constexpr, OUTPUT: tl.constexpr, ROWDOT: tl.constexpr, START: tl.constexpr, END: tl.constexpr,
    STATES: tl.constexpr, KEPT: tl.constexpr, VARLEN: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    """out_i = a_i S + Σ_j P_ij c_j and S ← decay ⊙ S + Σ_j b_j c_jᵀ, chunk by chunk, in either direction of
    time.

    The forward pass has (a, b, c) = (q, k, v). Gradients are the same sum with other roles: dq from (do, v,
    k), and in reversed time dk from (v, do, q) and dv from (k, q, do).

    SCORES: 0 none, 1 P = a bᵀ with the decay, 2 P read from `scores_ptr` (transposed when REVERSE).
    DECAY: 0 none, 1 log decay per token at `decay_ptr`, 2 decay over each chunk per row of the state (a and
    b then carry the decay inside the chunk).
    Strides in time are compile-time constants: offsets inside a tile then cost no registers.
    ROWDOT: also store Σ extra_i out_i without the term j = i, for the gradient of the log decay: the part
    inside the chunk and the part from the state.
    STATES: also store the state each chunk starts from.
    KEPT: also store the decay over the whole segment, per row of the state.
    """
    blocks: tl.constexpr = (C_WIDTH + C_BLOCK - 1) // C_BLOCK
    EVEN_A: tl.constexpr = A_WIDTH == A_BLOCK
    EVEN_C: tl.constexpr = C_WIDTH % C_BLOCK == 0
    pid = tl.program_id(0)
    block = pid % blocks
    rest = pid // blocks
    segment = rest % segments
    rest = rest // segments
    h = (rest % H).to(tl.int64)
    n = (rest // H).to(tl.int64)

    if VARLEN:
        first_row = tl.load(cu_ptr + n).to(tl.int64)
        length = (tl.load(cu_ptr + n + 1).to(tl.int64) - first_row).to(tl.int32)
        first_chunk = tl.load(cu_chunks_ptr + n).to(tl.int64)
        batch = n * 0
    else:
        first_row = n * 0
        length = T
        first_chunk = n * tl.cdiv(T, CHUNK)
        batch = n
    all_chunks = tl.cdiv(length, CHUNK)
    lowest = segment * chunks_per_segment
    count = tl.minimum(all_chunks, lowest + chunks_per_segment) - lowest

    row = tl.arange(0, CHUNK)
    ia = tl.arange(0, A_BLOCK)
    ic = block * C_BLOCK + tl.arange(0, C_BLOCK)
    a_ok = ia < A_WIDTH
    c_ok = ic < C_WIDTH

    if OUTPUT:
        a_base = a_ptr + batch * a_b + first_row * a_t + h * a_h
    b_base = b_ptr + batch * b_b + first_row * b_t + h * b_h
    c_base = c_ptr + batch * c_b + first_row * c_t + h * c_h
    if OUTPUT:
        o_base = out_ptr + batch * o_b + first_row * o_t + h * o_h
    if DECAY == 1:
        g_base = decay_ptr + batch * g_b + first_row * g_t + h * g_h
    if ROWDOT:
        e_base = extra_ptr + batch * e_b + first_row * e_t + h * e_h
    token = batch * T + first_row

    if START:
        state_ok = a_ok[:, None] & c_ok[None, :]
        start = start_ptr + n * s_n + h * s_h + segment * s_s + ia[:, None] * s_a + ic[None, :] * s_c
        state = tl.load(start, mask=state_ok, other=0.0).to(tl.float32) * start_scale
    else:
        state = tl.zeros([A_BLOCK, C_BLOCK], tl.float32)

    kept = tl.full([A_BLOCK], 1.0, tl.float32)

    for i in range(0, count):
        if REVERSE:
            chunk = lowest + count - 1 - i
        else:
            chunk = lowest + i
        t = chunk * CHUNK + row
        ok = t < length
        first = (chunk * CHUNK).to(tl.int64)  # offsets inside a tile fit 32 bits, those of its start may not
        b = load_tile(b_base + first * b_t + (row[:, None] * b_t + ia[None, :]), ok, a_ok, EVEN, EVEN_A)
        c = load_tile(c_base + first * c_t + (row[:, None] * c_t + ic[None, :]), ok, c_ok, EVEN, EVEN_C)

        if STATES:
            spot = ((first_chunk + chunk) * H + h) * (A_WIDTH * C_WIDTH)
            store_tile(
                states_ptr + spot + (ia[:, None] * C_WIDTH + ic[None, :]),
                state.to(states_ptr.dtype.element_ty),
                a_ok,
                c_ok,
                EVEN_A,
                EVEN_C,
            )
        if DECAY == 1:
            if EVEN:
                g = tl.load(g_base + first * g_t + row * g_t)
            else:
                g = tl.load(g_base + first * g_t + row * g_t, mask=ok, other=0.0)
            if EXACT:
                high, low = split_sum(g)
                G_low = tl.cumsum(low, 0)
                all_low = tl.sum(low, 0)
            else:
                high = tl.maximum(g, FLOOR)
            G = tl.cumsum(high, 0)
            all = tl.sum(high, 0)
            if not EXACT:
                G_low = G
                all_low = all
            from_start = tl.exp(whole(G, G_low, EXACT))
            to_end = tl.exp(difference(all, all_low, G, G_low, EXACT))
            over_chunk = tl.exp(whole(all, all_low, EXACT))
            if REVERSE:
                row_decay = to_end
                update_decay = from_start
            else:
                row_decay = from_start
                update_decay = to_end

        if OUTPUT:
            a = load_tile(a_base + first * a_t + (row[:, None] * a_t + ia[None, :]), ok, a_ok, EVEN, EVEN_A)
            if SCORES == 1:
                scores = tl.dot(a, tl.trans(b), input_precision=PRECISION)
            out = tl.dot(a, state.to(a.dtype), input_precision=PRECISION)
            if DECAY == 1:
                out = out * row_decay[:, None]
            if ROWDOT:
                e = load_tile(e_base + first * e_t + (row[:, None] * e_t + ic[None, :]), ok, c_ok, EVEN, EVEN_C)
                from_state = tl.sum(out * e.to(tl.float32), 1)
            if SCORES == 1:
                if REVERSE:
                    seen = row[:, None] <= row[None, :]
                else:
                    seen = row[:, None] >= row[None, :]
                if DECAY == 1:
                    if REVERSE:
                        between = difference(G[None, :], G_low[None, :], G[:, None], G_low[:, None], EXACT)
                    else:
                        between = difference(G[:, None], G_low[:, None], G[None, :], G_low[None, :], EXACT)
                    scores = scores * tl.exp(tl.where(seen, between, float("-inf")))
                else:
                    scores = tl.where(seen, scores, 0.0)
                if ROWDOT:
                    own = row[:, None] == row[None, :]
                    diagonal = tl.sum(tl.where(own, scores, 0.0), 1)
                    inside = tl.dot(tl.where(own, 0.0, scores).to(c.dtype), c, input_precision=PRECISION)
                    dots = rowdot_ptr + block * rowdot_stride + (batch * H + h) * T + first_row + first + row
                    tl.store(dots, tl.sum(inside * e.to(tl.float32), 1) * out_scale, mask=ok)
                    tl.store(dots + rowdot_part, from_state * out_scale, mask=ok)
                    out += inside + diagonal[:, None] * c.to(tl.float32)
                else:
                    out = tl.dot(scores.to(c.dtype), c, out, input_precision=PRECISION)
            if SCORES == 2:
                spot = (
                    scores_ptr
                    + ((token + first) * H + h) * CHUNK
                    + (row[:, None] * (H * CHUNK) + row[None, :])
                )
                if EVEN:
                    scores = tl.load(spot)
                else:
                    scores = tl.load(spot, mask=ok[:, None], other=0.0)
                if REVERSE:
                    scores = tl.trans(scores)
                out = tl.dot(scores, c, out, input_precision=PRECISION)
            store_tile(
                o_base + first * o_t + (row[:, None] * o_t + ic[None, :]),
                (out * out_scale).to(out_ptr.dtype.element_ty),
                ok,
                c_ok,
                EVEN,
                EVEN_C,
            )

        if DECAY == 1:
            state = state * over_chunk
            if KEPT:
                kept = kept * over_chunk
            c = (c.to(tl.float32) * update_decay[:, None]).to(c.dtype)
        if DECAY == 2:
            spot = decay_ptr + ((first_chunk + chunk) * H + h) * A_WIDTH + ia
            decay = tl.load(spot, mask=a_ok, other=0.0)
            state = state * decay[:, None]
            if KEPT:
                kept = kept * decay
        state = tl.dot(tl.trans(b), c, state, input_precision=PRECISION)

    if END:
        state_ok = a_ok[:, None] & c_ok[None, :]
        end = end_ptr + n * f_n + h * f_h + segment * f_s + ia[:, None] * f_a + ic[None, :] * f_c
        tl.store(end, state * end_scale, mask=state_ok)
    if KEPT:
        if block == 0:
            tl.store(kept_ptr + ((n * H + h) * segments + segment) * A_WIDTH + ia, kept, mask=a_ok)


def scan(
    packing: Packing,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    out: Tensor | None = None,
    scores: Tensor | None = None,
    log_decay: Tensor | None = None,
    total: Tensor | None = None,
    extra: Tensor | None = None,
    rowdot: Tensor | None = None,
    start: Tensor | None = None,
    end: Tensor | None = None,
    states: Tensor | None = None,
    kept: Tensor | None = None,
    reverse: bool = False,
    segments: int = 1,
    scale: float = 1.0,
    start_scale: float = 1.0,
    end_scale: float = 1.0,
    launch: table.Launch | None = None,
) -> None:
    """Launch `_scan`. start and end are [N,H,A,C], or [N,H,S,A,C] when there are segments; any strides."""
    H, A, C = a.shape[2], a.shape[3], c.shape[3]
    dtype = c.dtype
    launch = launch or table.scan_launch(
        A,
        C,
        dtype.itemsize,
        per_token=log_decay is not None,
        chunk_scores=scores is not None and states is None,
    )
    programs = packing.sequences * H * segments * triton.cdiv(C, launch.block)
    if programs == 0:
        return
    strides = []
    for x in (a, b, c, out, extra, log_decay):
        strides += [0, 0, 0] if x is None else list(x.stride()[:3])
    for x in (start, end):
        if x is None:
            strides += [0, 0, 0, 0, 0]
        elif x.dim() == 5:
            strides += [x.stride(0), x.stride(1), x.stride(3), x.stride(4), x.stride(2)]
        else:
            strides += [*x.stride(), 0]
    chunks = triton.cdiv(packing.T, CHUNK)
    fitting.launch(
        _scan,
        (programs,),
        a,
        b,
        c,
        out,
        scores,
        total if log_decay is None else log_decay,
        extra,
        rowdot,
        start,
        end,
        states,
        kept,
        packing.cu,
        packing.cu_chunks,
        packing.T,
        H,
        segments,
        triton.cdiv(chunks, segments),
        scale,
        start_scale,
        end_scale,
        *((0, 0) if rowdot is None else rowdot.stride()[:2]),
        *strides,
        A_WIDTH=A,
        C_WIDTH=C,
        A_BLOCK=table.padded(A, dtype.itemsize),
        C_BLOCK=launch.block,
        CHUNK=CHUNK,
        SCORES=0 if out is None else 1 if scores is None else 2,
        DECAY=1 if log_decay is not None else 2 if total is not None else 0,
        REVERSE=reverse,
        OUTPUT=out is not None,
        ROWDOT=rowdot is not None,
        START=start is not None,
        END=end is not None,
        STATES=states is not None,
        KEPT=kept is not None,
        VARLEN=packing.varlen,
        EVEN=packing.even,
        EXACT=dtype == torch.float32,
        PRECISION=dot_precision(dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
