"""Linear attention on the GPU: the Triton kernels of the forward pass and how they are launched.

One kernel, `_scan`, walks a sequence chunk by chunk with a block of the state in registers. With no decay or
one per token it computes the scores of a chunk itself, so q, k and v are read once and only the output is
written. With a decay per channel, or values too wide for that, `_prepare` first writes what does not depend
on the values: the scores of each chunk, and q and k carrying the decay from the chunk's start and to its
end. Few heads and long sequences are
cut into segments that are scanned side by side: once for their states, then, from the right start, for the
outputs.

Bounds per token and head in 16-bit: without `_prepare` it moves 2·(2K + 2V) bytes and does about 4·C·K +
4·K·V operations, so on an H200 it is bound by memory bandwidth up to K = V = 128; `_prepare` adds 8·K + 4·K
+ 2·C bytes written and read, and 4·K for the log decay.

Suffixes: B batch, N sequences, T time, H heads, K key width, V value width, C chunk length, S segments.
"""

# ruff: noqa: SIM102, SIM108  (branches on compile-time constants read and compile best as statements)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from linearize.kernels.linear_attention.launch import (
    CHUNK,
    Launch,
    padded,
    prepare_launch,
    scan_launch,
    segments,
)
from torch import Tensor

# A chunk whose summed log decay is above this takes its scores in one product: with the exponents centred
# they stay below 60 in size, and e^60 is far from overflowing. Stronger decays are split until every
# exponent is <= 0.
_SPAN = tl.constexpr(120.0)
# Log decays are clamped here (e^-1000 is 0), which keeps their sums exact.
_FLOOR = tl.constexpr(-1000.0)


@triton.jit
def _tile(ptr, row_ok, column_ok, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """Load a tile, zeros outside; masks that are always true are left out."""
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(ptr)
    elif EVEN_ROWS:
        return tl.load(ptr, mask=column_ok[None, :], other=0.0)
    elif EVEN_COLUMNS:
        return tl.load(ptr, mask=row_ok[:, None], other=0.0)
    else:
        return tl.load(ptr, mask=row_ok[:, None] & column_ok[None, :], other=0.0)


@triton.jit
def _put(ptr, value, row_ok, column_ok, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """Store a tile inside its bounds."""
    if EVEN_ROWS and EVEN_COLUMNS:
        tl.store(ptr, value)
    elif EVEN_ROWS:
        tl.store(ptr, value, mask=column_ok[None, :])
    elif EVEN_COLUMNS:
        tl.store(ptr, value, mask=row_ok[:, None])
    else:
        tl.store(ptr, value, mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def _split(g):
    """A log decay as a multiple of 1/64, whose sums are exact, and a rest below 1/64, whose sums stay "
    "small."""
    g = tl.maximum(g, _FLOOR)
    high = tl.floor(g * 64.0) * 0.015625
    return high, g - high


@triton.jit
def _whole(a, a_low, EXACT: tl.constexpr):
    if EXACT:
        return a + a_low
    else:
        return a


@triton.jit
def _difference(a, a_low, b, b_low, EXACT: tl.constexpr):
    if EXACT:
        return (a - b) + (a_low - b_low)
    else:
        return a - b


@triton.jit(do_not_specialize=["T", "segments", "chunks_per_segment"])
def _scan(
    a_ptr,
    b_ptr,
    c_ptr,
    out_ptr,
    scores_ptr,
    decay_ptr,
    extra_ptr,
    rowdot_ptr,
    start_ptr,
    end_ptr,
    states_ptr,
    cu_ptr,
    cu_chunks_ptr,
    T,
    H: tl.constexpr,
    segments,
    chunks_per_segment,
    out_scale,
    start_scale,
    end_scale,
    rowdot_stride,
    rowdot_part,
    a_b,
    a_t: tl.constexpr,
    a_h,
    b_b,
    b_t: tl.constexpr,
    b_h,
    c_b,
    c_t: tl.constexpr,
    c_h,
    o_b,
    o_t: tl.constexpr,
    o_h,
    e_b,
    e_t: tl.constexpr,
    e_h,
    g_b,
    g_t: tl.constexpr,
    g_h,
    s_n,
    s_h,
    s_a,
    s_c,
    s_s,
    f_n,
    f_h,
    f_a,
    f_c,
    f_s,
    A_WIDTH: tl.constexpr,
    C_WIDTH: tl.constexpr,
    A_BLOCK: tl.constexpr,
    C_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SCORES: tl.constexpr,
    DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
    OUTPUT: tl.constexpr,
    ROWDOT: tl.constexpr,
    START: tl.constexpr,
    END: tl.constexpr,
    STATES: tl.constexpr,
    VARLEN: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
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

    for i in range(0, count):
        if REVERSE:
            chunk = lowest + count - 1 - i
        else:
            chunk = lowest + i
        t = chunk * CHUNK + row
        ok = t < length
        first = (chunk * CHUNK).to(tl.int64)  # offsets inside a tile fit 32 bits, those of its start may not
        b = _tile(b_base + first * b_t + (row[:, None] * b_t + ia[None, :]), ok, a_ok, EVEN, EVEN_A)
        c = _tile(c_base + first * c_t + (row[:, None] * c_t + ic[None, :]), ok, c_ok, EVEN, EVEN_C)

        if STATES:
            spot = ((first_chunk + chunk) * H + h) * (A_WIDTH * C_WIDTH)
            _put(
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
                high, low = _split(g)
                G_low = tl.cumsum(low, 0)
                all_low = tl.sum(low, 0)
            else:
                high = tl.maximum(g, _FLOOR)
            G = tl.cumsum(high, 0)
            all = tl.sum(high, 0)
            if not EXACT:
                G_low = G
                all_low = all
            from_start = tl.exp(_whole(G, G_low, EXACT))
            to_end = tl.exp(_difference(all, all_low, G, G_low, EXACT))
            over_chunk = tl.exp(_whole(all, all_low, EXACT))
            if REVERSE:
                row_decay = to_end
                update_decay = from_start
            else:
                row_decay = from_start
                update_decay = to_end

        if OUTPUT:
            a = _tile(a_base + first * a_t + (row[:, None] * a_t + ia[None, :]), ok, a_ok, EVEN, EVEN_A)
            if SCORES == 1:
                scores = tl.dot(a, tl.trans(b), input_precision=PRECISION)
            out = tl.dot(a, state.to(a.dtype), input_precision=PRECISION)
            if DECAY == 1:
                out = out * row_decay[:, None]
            if ROWDOT:
                e = _tile(e_base + first * e_t + (row[:, None] * e_t + ic[None, :]), ok, c_ok, EVEN, EVEN_C)
                from_state = tl.sum(out * e.to(tl.float32), 1)
            if SCORES == 1:
                if REVERSE:
                    seen = row[:, None] <= row[None, :]
                else:
                    seen = row[:, None] >= row[None, :]
                if DECAY == 1:
                    if REVERSE:
                        between = _difference(G[None, :], G_low[None, :], G[:, None], G_low[:, None], EXACT)
                    else:
                        between = _difference(G[:, None], G_low[:, None], G[None, :], G_low[None, :], EXACT)
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
            _put(
                o_base + first * o_t + (row[:, None] * o_t + ic[None, :]),
                (out * out_scale).to(out_ptr.dtype.element_ty),
                ok,
                c_ok,
                EVEN,
                EVEN_C,
            )

        if DECAY == 1:
            state = state * over_chunk
            c = (c.to(tl.float32) * update_decay[:, None]).to(c.dtype)
        if DECAY == 2:
            spot = decay_ptr + ((first_chunk + chunk) * H + h) * A_WIDTH + ia
            state = state * tl.load(spot, mask=a_ok, other=0.0)[:, None]
        state = tl.dot(tl.trans(b), c, state, input_precision=PRECISION)

    if END:
        state_ok = a_ok[:, None] & c_ok[None, :]
        end = end_ptr + n * f_n + h * f_h + segment * f_s + ia[:, None] * f_a + ic[None, :] * f_c
        tl.store(end, state * end_scale, mask=state_ok)


@triton.jit(do_not_specialize=["segments", "H"])
def _join_segments(
    states_ptr,
    decay_ptr,
    start_ptr,
    end_ptr,
    segments,
    H,
    s_n,
    s_h,
    s_k,
    s_v,
    start_scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    END: tl.constexpr,
):
    """Turn the states [N,H,S,K,V] that segments end with, each from zero, into those that they start from."""
    spot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    nh = tl.program_id(1).to(tl.int64)
    ok = spot < K * V
    ik = spot // V
    iv = spot % V
    if START:
        source = start_ptr + (nh // H) * s_n + (nh % H) * s_h + ik * s_k + iv * s_v
        state = tl.load(source, mask=ok, other=0.0).to(tl.float32) * start_scale
    else:
        state = tl.zeros([BLOCK], tl.float32)
    for i in range(0, segments):
        if REVERSE:
            segment = segments - 1 - i
        else:
            segment = i
        here = states_ptr + (nh * segments + segment) * (K * V) + spot
        gained = tl.load(here, mask=ok, other=0.0)
        tl.store(here, state, mask=ok)
        if DECAY == 1:
            state = state * tl.load(decay_ptr + nh * segments + segment)
        if DECAY == 2:
            state = state * tl.load(decay_ptr + (nh * segments + segment) * K + ik, mask=ok, other=0.0)
        state += gained
    if END:
        tl.store(end_ptr + nh * (K * V) + spot, state, mask=ok)


@triton.jit
def _find_chunk(index, N, T, cu_ptr, cu_chunks_ptr, CHUNK: tl.constexpr, VARLEN: tl.constexpr):
    """Which sequence a chunk belongs to: (batch, first row, length, chunk in the sequence)."""
    if VARLEN:
        low = 0
        high = N
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(cu_chunks_ptr + middle) <= index:
                low = middle
            else:
                high = middle
        first_row = tl.load(cu_ptr + low).to(tl.int64)
        length = (tl.load(cu_ptr + low + 1).to(tl.int64) - first_row).to(tl.int32)
        chunk = index - tl.load(cu_chunks_ptr + low).to(tl.int32)
        batch = first_row * 0
    else:
        per = tl.cdiv(T, CHUNK)
        batch = (index // per).to(tl.int64)
        chunk = index % per
        first_row = batch * 0
        length = T
    return batch, first_row, length, chunk


@triton.jit
def _rows(x, index, CHUNK: tl.constexpr, K_BLOCK: tl.constexpr):
    """x[index], row by row."""
    return tl.gather(x, tl.broadcast_to(index[:, None], (CHUNK, K_BLOCK)), 0)


@triton.jit
def _lower_halves(row, half):
    """Pairs (query, key) of one block of 2·half rows, the query in its second half, the key in its first."""
    block = row // half
    return (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)


@triton.jit
def _lower_triangles(row, WIDTH: tl.constexpr):
    """Pairs (query, key) of one block of WIDTH rows, the query after the key."""
    return (row[:, None] // WIDTH == row[None, :] // WIDTH) & (row[:, None] > row[None, :])


@triton.jit
def _log_decays(g, EXCLUSIVE: tl.constexpr, EXACT: tl.constexpr):
    """Sums of log decay in a chunk, to the query at i and to the key at j, and each one's rest (see
    `_split`).

    The query's sum leaves its own step out if EXCLUSIVE. Without EXACT the rests stand unused: sums are then
    right to about 1e-7 of the chunk's whole log decay.
    """
    if EXACT:
        high, low = _split(g)
        k_low = tl.cumsum(low, 0)
        q_low = k_low
        if EXCLUSIVE:
            q_low = k_low - low
    else:
        high = g
    k_sum = tl.cumsum(high, 0)
    q_sum = k_sum
    if EXCLUSIVE:
        q_sum = k_sum - high
    if not EXACT:
        k_low = k_sum
        q_low = q_sum
    return q_sum, q_low, k_sum, k_low


@triton.jit
def _to_end(k_sum, k_low, g, EXACT: tl.constexpr):
    """Log decay from the key at j to the end of the chunk."""
    if EXACT:
        high, low = _split(g)
        return (tl.sum(high, 0)[None, :] - k_sum) + (tl.sum(low, 0)[None, :] - k_low)
    else:
        return tl.sum(g, 0)[None, :] - k_sum


@triton.jit
def _centred(
    q_sum,
    q_low,
    k_sum,
    k_low,
    g,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Decay factors of queries and keys about the middle of the decay over their block of WIDTH rows."""
    if EXACT:
        high, low = _split(g)
        before_low = k_low - low
    else:
        high = g
    before = k_sum - high
    if WIDTH == CHUNK:
        m = 0.5 * tl.sum(high, 0)[None, :]
        m_low = m
        if EXACT:
            m_low = 0.5 * tl.sum(low, 0)[None, :]
    else:
        row = tl.arange(0, CHUNK)
        first = row // WIDTH * WIDTH
        last = first + WIDTH - 1
        m = 0.5 * (_rows(before, first, CHUNK, K_BLOCK) + _rows(k_sum, last, CHUNK, K_BLOCK))
        m_low = m
        if EXACT:
            m_low = 0.5 * (_rows(before_low, first, CHUNK, K_BLOCK) + _rows(k_low, last, CHUNK, K_BLOCK))
    queries = tl.exp(_difference(q_sum, q_low, m, m_low, EXACT))
    keys = tl.exp(_difference(m, m_low, k_sum, k_low, EXACT))
    return queries, keys


@triton.jit
def _halved(
    q_sum, q_low, k_sum, k_low, half, CHUNK: tl.constexpr, K_BLOCK: tl.constexpr, EXACT: tl.constexpr
):
    """Decay factors of second-half queries since, and first-half keys until, the end of the first half."""
    row = tl.arange(0, CHUNK)
    middle = row // (2 * half) * (2 * half) + half - 1
    m = _rows(k_sum, middle, CHUNK, K_BLOCK)
    m_low = m
    if EXACT:
        m_low = _rows(k_low, middle, CHUNK, K_BLOCK)
    queries = tl.exp(tl.minimum(_difference(q_sum, q_low, m, m_low, EXACT), 0.0))
    keys = tl.exp(tl.minimum(_difference(m, m_low, k_sum, k_low, EXACT), 0.0))
    return queries, keys


@triton.jit
def _product(q, k, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """q kᵀ in a dtype wide enough for centred decay factors."""
    return tl.dot(q.to(WIDE), tl.trans(k.to(WIDE)), input_precision=PRECISION)


@triton.jit
def _weakest(g, WIDTH: tl.constexpr, CHUNK: tl.constexpr, K_BLOCK: tl.constexpr):
    """The lowest sum of log decay over any block of WIDTH rows and any channel."""
    sums = tl.sum(tl.reshape(g, (CHUNK // WIDTH, WIDTH, K_BLOCK)), 1)
    return tl.min(tl.min(sums, 1), 0)


@triton.jit(do_not_specialize=["N", "T"])
def _prepare(
    q_ptr,
    k_ptr,
    g_ptr,
    u_ptr,
    q_out_ptr,
    k_out_ptr,
    scores_ptr,
    total_ptr,
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
    g_b,
    g_t: tl.constexpr,
    g_h,
    g_k: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BONUS: tl.constexpr,
    VARLEN: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores of a chunk [T,H,C], and q and k carrying decay, for a decay per channel; the scale goes into "
    "q."""
    LEVELS: tl.constexpr = 6
    tl.static_assert(CHUNK == 1 << LEVELS)
    EVEN_K: tl.constexpr = K % K_BLOCK == 0
    index = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    if VARLEN:
        if index >= tl.load(cu_chunks_ptr + N):
            return
    batch, first_row, length, chunk = _find_chunk(index, N, T, cu_ptr, cu_chunks_ptr, CHUNK, VARLEN)
    row = tl.arange(0, CHUNK)
    t = chunk * CHUNK + row
    ok = t < length
    first = first_row + chunk * CHUNK
    token = batch * T + first

    strict = tl.zeros([CHUNK, CHUNK], tl.float32)
    diagonal = tl.zeros([CHUNK], tl.float32)
    for k0 in range(0, K, K_BLOCK):
        ik = k0 + tl.arange(0, K_BLOCK)
        k_ok = ik < K
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
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        q_sum, q_low, k_sum, k_low = _log_decays(g, BONUS, EXACT)
        total = tl.sum(g, 0)

        if BONUS:
            u = tl.load(u_ptr + h * K + ik, mask=k_ok, other=0.0)
            diagonal += tl.sum(q * k * u[None, :], 1)
        else:
            diagonal += tl.sum(q * k, 1)

        if tl.min(total, 0) > -_SPAN:
            fq, fk = _centred(q_sum, q_low, k_sum, k_low, g, CHUNK, CHUNK, K_BLOCK, EXACT)
            strict += tl.where(row[:, None] > row[None, :], _product(q * fq, k * fk, WIDE, PRECISION), 0.0)
        else:
            level = 0
            if _weakest(g, 16, CHUNK, K_BLOCK) > -_SPAN:
                fq, fk = _centred(q_sum, q_low, k_sum, k_low, g, 16, CHUNK, K_BLOCK, EXACT)
                part = _product(q * fq, k * fk, WIDE, PRECISION)
                strict += tl.where(_lower_triangles(row, 16), part, 0.0)
                level = 4
            while level < LEVELS:
                fq, fk = _halved(q_sum, q_low, k_sum, k_low, 1 << level, CHUNK, K_BLOCK, EXACT)
                part = _product(q * fq, k * fk, WIDE, PRECISION)
                strict += tl.where(_lower_halves(row, 1 << level), part, 0.0)
                level += 1

        wide = (token * H + h) * K + (row[:, None] * (H * K) + ik[None, :])
        q = q * tl.exp(_whole(q_sum, q_low, EXACT)) * scale
        k = k * tl.exp(_to_end(k_sum, k_low, g, EXACT))
        _put(q_out_ptr + wide, q.to(q_out_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)
        _put(k_out_ptr + wide, k.to(k_out_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)
        tl.store(total_ptr + (index.to(tl.int64) * H + h) * K + ik, tl.exp(total), mask=k_ok)

    own = row[:, None] == row[None, :]
    scores = tl.where(own, diagonal[:, None], strict) * scale
    spot = scores_ptr + (token * H + h) * CHUNK + (row[:, None] * (H * CHUNK) + row[None, :])
    if EVEN:
        tl.store(spot, scores.to(scores_ptr.dtype.element_ty))
    else:
        tl.store(spot, scores.to(scores_ptr.dtype.element_ty), mask=ok[:, None])


# --- launching
# -------------------------------------------------------------------------------------------------------


def operand_dtype(*tensors: Tensor) -> torch.dtype:
    """What matrix products read: the inputs' dtype where they agree, float32 where they don't."""
    dtype = tensors[0].dtype
    return dtype if all(t.dtype == dtype for t in tensors) else torch.float32


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products keep float32's digits; 16-bit ones are exact in the matrix units anyway."""
    return "ieee" if dtype == torch.float32 else "tf32"


def wide_dtype(dtype: torch.dtype) -> tl.dtype:
    """For products of factors up to e^60: bfloat16 has the range, float16 needs tf32."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def last_dense(x: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class Packing:
    """Where sequences and their chunks lie; no value is read by the host."""

    def __init__(self, B: int, T: int, cu_seqlens: Tensor | None) -> None:
        self.T = T
        self.varlen = cu_seqlens is not None
        if cu_seqlens is None:
            self.sequences = B
            self.chunks = B * triton.cdiv(T, CHUNK)
            self.cu = self.cu_chunks = None
        else:
            self.sequences = cu_seqlens.numel() - 1
            self.chunks = (
                triton.cdiv(T, CHUNK) + self.sequences
            )  # at most: one part chunk more for each sequence
            self.cu = cu_seqlens.to(torch.int32)
            lengths = self.cu[1:] - self.cu[:-1]
            self.cu_chunks = torch.nn.functional.pad(
                ((lengths + CHUNK - 1) // CHUNK).cumsum(0, dtype=torch.int32), (1, 0)
            )

    @property
    def even(self) -> bool:
        """Whether every chunk is full, for certain."""
        return not self.varlen and self.T % CHUNK == 0


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
    reverse: bool = False,
    segments: int = 1,
    scale: float = 1.0,
    start_scale: float = 1.0,
    end_scale: float = 1.0,
    launch: Launch | None = None,
) -> None:
    """Launch `_scan`. start and end are [N,H,A,C], or [N,H,S,A,C] when there are segments; any strides."""
    H, A, C = a.shape[2], a.shape[3], c.shape[3]
    dtype = c.dtype
    launch = launch or scan_launch(A, C, dtype.itemsize, rowdot=rowdot is not None)
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
    _scan[(programs,)](
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
        A_BLOCK=padded(A),
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
        VARLEN=packing.varlen,
        EVEN=packing.even,
        EXACT=dtype == torch.float32,
        PRECISION=dot_precision(dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def segment_states(
    packing: Packing,
    b: Tensor,
    c: Tensor,
    *,
    segments: int,
    log_decay: Tensor | None = None,
    total: Tensor | None = None,
    start: Tensor | None = None,
    end: Tensor | None = None,
    reverse: bool = False,
    start_scale: float = 1.0,
) -> Tensor:
    """The state [N,H,S,K,V] that each segment starts from, by a scan of every segment from zero; fills "
    "`end`."""
    N, H, K, V = packing.sequences, b.shape[2], b.shape[3], c.shape[3]
    states = torch.empty(N, H, segments, K, V, dtype=torch.float32, device=b.device)
    scan(packing, b, b, c, log_decay=log_decay, total=total, end=states, reverse=reverse, segments=segments)
    chunks = triton.cdiv(packing.T, CHUNK)
    per = triton.cdiv(chunks, segments)
    decay = None
    if log_decay is not None:  # [N,H,S]
        g_NTH = torch.nn.functional.pad(
            log_decay.expand(N, packing.T, H), (0, 0, 0, per * segments * CHUNK - packing.T)
        )
        decay = g_NTH.reshape(N, segments, -1, H).sum(2).exp().transpose(1, 2).contiguous()
    if total is not None:  # [N,H,S,K]
        d = torch.nn.functional.pad(
            total.view(N, chunks, H, K), (0, 0, 0, 0, 0, per * segments - chunks), value=1.0
        )
        decay = d.view(N, segments, per, H, K).prod(2).transpose(1, 2).contiguous()
    block = 1024
    _join_segments[(triton.cdiv(K * V, block), N * H)](
        states,
        decay,
        start,
        end,
        segments,
        H,
        *((0, 0, 0, 0) if start is None else start.stride()),
        start_scale,
        K=K,
        V=V,
        BLOCK=block,
        DECAY=0 if decay is None else decay.dim() - 2,
        REVERSE=reverse,
        START=start is not None,
        END=end is not None,
        num_warps=4,
    )
    return states


def prepare(
    packing: Packing, q: Tensor, k: Tensor, g: Tensor, bonus: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch `_prepare`: q and k with decay [B,T,H,K], scores [B,T,H,C], decay over each chunk "
    "[chunks,H,K]."""
    B, T, H, K = q.shape
    q_out, k_out = (
        torch.empty(B, T, H, K, dtype=q.dtype, device=q.device),
        torch.empty(B, T, H, K, dtype=k.dtype, device=q.device),
    )
    scores = torch.empty(B, T, H, CHUNK, dtype=q.dtype, device=q.device)
    total = torch.empty(packing.chunks, H, K, dtype=torch.float32, device=q.device)
    launch = prepare_launch(K, q.dtype.itemsize)
    _prepare[(packing.chunks, H)](
        q,
        k,
        g,
        bonus,
        q_out,
        k_out,
        scores,
        total,
        packing.cu,
        packing.cu_chunks,
        packing.sequences,
        T,
        H,
        scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *g.stride(),
        K=K,
        K_BLOCK=launch.block,
        CHUNK=CHUNK,
        BONUS=bonus is not None,
        VARLEN=packing.varlen,
        EVEN=packing.even,
        EXACT=q.dtype == torch.float32,
        WIDE=wide_dtype(q.dtype),
        PRECISION=dot_precision(q.dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return q_out, k_out, scores, total


def per_channel(g: Tensor | None, q: Tensor) -> Tensor:
    """Any log decay as a [B,T,H,K] view."""
    if g is None:
        return q.new_zeros(1, 1, 1, 1, dtype=torch.float32).expand(q.shape)
    return (g if g.dim() == 4 else g[..., None]).expand(q.shape)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    bonus: Tensor | None,
    scale: float,
    start: Tensor | None,
    packing: Packing,
    want_end: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, final state and, if the sequences were cut, the states [N,H,S,K,V] that segments start from.

    q, k, v share a dtype and are dense in their last dimension; g is float32, [B or 1, T, H] or [B, T, H, K].
    """
    B, T, H, K = q.shape
    V = v.shape[3]
    o = torch.empty(B, T, H, V, dtype=v.dtype, device=v.device)
    end = torch.empty(packing.sequences, H, K, V, dtype=torch.float32, device=v.device) if want_end else None
    decay: dict[str, Any] = {} if g is None else {"log_decay": g}
    scores = None
    if bonus is not None or (g is not None and g.dim() == 4):
        q, k, scores, total = prepare(packing, q, k, per_channel(g, q), bonus, scale)
        decay, scale = {"total": total}, 1.0
    count = cuts(packing.sequences, T, H, K, V, q, packing.varlen)
    if count == 1:
        scan(packing, q, k, v, out=o, scores=scores, start=start, end=end, scale=scale, **decay)
        return o, end, None
    states = segment_states(packing, k, v, segments=count, start=start, end=end, **decay)
    scan(packing, q, k, v, out=o, scores=scores, start=states, segments=count, scale=scale, **decay)
    return o, end, states


def cuts(sequences: int, T: int, H: int, K: int, V: int, q: Tensor, varlen: bool) -> int:
    """How many segments each sequence is cut into; packed sequences are left whole."""
    if varlen:
        return 1
    blocks = -(-V // scan_launch(K, V, q.dtype.itemsize).block)
    return segments(sequences * H * blocks, -(-T // CHUNK), q.device)
