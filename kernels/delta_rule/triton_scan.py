"""The delta rule's two passes over time, each walking a sequence chunk by chunk with a block of the state in registers.

Forward, with r the errors, S the state before a chunk and `S'` the one after it:

    r = U − W S,   o = scale · (e^G q S + P β r),   S' = e^{G_C} S + (e^{G_C − G} k)ᵀ β r

Backward in time, with dS' the gradient of the state after a chunk:

    dr = β (scale · Pᵀ do + e^{G_C − G} k dS'),   dv = Mᵀ dr,   dS = e^{G_C} dS' + scale · (e^G q)ᵀ do − Wᵀ dr

Bounds per token and head in 16 bits: 6K + 4V bytes (backward 6K + 4V + 2C, and 2·K·V/C for the states that either writes
for `finish`); 2·C·(K + V) + 6·K·V operations (backward 2·C·(K + 2V) + 6·K·V).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels import fitting
from linearize.kernels.delta_rule import launch as table
from linearize.kernels.delta_rule.launch import CHUNK, padded
from linearize.kernels.delta_rule.triton_prepare import Prepared
from linearize.kernels.delta_rule.triton_tiles import decays_between, token_decays
from linearize.kernels.linear_attention.triton_common import Packing, dot_precision
from linearize.kernels.linear_attention.triton_tiles import load_tile, store_tile


# fmt: off
@triton.jit(do_not_specialize=["T"])
def _scan(
    q_ptr, k_ptr, w_ptr, u_ptr, beta_ptr, scores_ptr, decay_ptr, o_ptr, r_ptr, states_ptr, start_ptr, end_ptr,
    cu_ptr, cu_chunks_ptr, T, H: tl.constexpr, scale, q_b, q_t: tl.constexpr, q_h, k_b, k_t: tl.constexpr, k_h,
    b_b, b_t: tl.constexpr, b_h, g_b, g_t: tl.constexpr, g_h, s_n, s_h, s_k, s_v, K: tl.constexpr, V: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CHUNK: tl.constexpr, DECAY: tl.constexpr, OUTPUT: tl.constexpr,
    KEEP: tl.constexpr, START: tl.constexpr, END: tl.constexpr, VARLEN: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """OUTPUT: write o. KEEP: write r, and the state each chunk starts from. END: write the last state.

    DECAY: 0 none, 1 log decay per token, 2 decay over each chunk per row of the state (q and k then carry the decay
    inside the chunk, and the scores are read).
    """
    blocks: tl.constexpr = (V + V_BLOCK - 1) // V_BLOCK
    EVEN_K: tl.constexpr = K == K_BLOCK
    EVEN_V: tl.constexpr = V % V_BLOCK == 0
    pid = tl.program_id(0)
    block = pid % blocks
    rest = pid // blocks
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
    row = tl.arange(0, CHUNK)
    ik = tl.arange(0, K_BLOCK)
    iv = block * V_BLOCK + tl.arange(0, V_BLOCK)
    k_ok = ik < K
    v_ok = iv < V
    q_base = q_ptr + batch * q_b + first_row * q_t + h * q_h
    k_base = k_ptr + batch * k_b + first_row * k_t + h * k_h
    beta_base = beta_ptr + batch * b_b + first_row * b_t + h * b_h
    if DECAY == 1:
        g_base = decay_ptr + batch * g_b + first_row * g_t + h * g_h
    start_token = (batch * T + first_row) * H + h
    state_spot = ik[:, None] * V + iv[None, :]

    state = tl.zeros([K_BLOCK, V_BLOCK], tl.float32)
    if START:
        source = start_ptr + n * s_n + h * s_h + ik[:, None] * s_k + iv[None, :] * s_v
        state = tl.load(source, mask=k_ok[:, None] & v_ok[None, :], other=0.0).to(tl.float32)

    for chunk in range(0, tl.cdiv(length, CHUNK)):
        ok = chunk * CHUNK + row < length
        first = n * 0 + chunk * CHUNK  # in 64 bits: offsets inside a tile fit 32, those of its start may not
        token = start_token + first * H
        w = load_tile(w_ptr + token * K + (row[:, None] * (H * K) + ik[None, :]), ok, k_ok, EVEN, EVEN_K)
        values = token * V + (row[:, None] * (H * V) + iv[None, :])
        u = load_tile(u_ptr + values, ok, v_ok, EVEN, EVEN_V)
        k = load_tile(k_base + first * k_t + (row[:, None] * k_t + ik[None, :]), ok, k_ok, EVEN, EVEN_K)
        beta = tl.load(beta_base + first * b_t + row * b_t, mask=ok, other=0.0)
        if DECAY == 1:
            g = tl.load(g_base + first * g_t + row * g_t, mask=ok, other=0.0)
            G, G_low, from_start, to_end, over_chunk = token_decays(g, EXACT)

        u = -u.to(tl.float32)  # before s: its change of layout then needs no shared memory beside s
        s = state.to(w.dtype)
        r = -tl.dot(w, s, u, input_precision=PRECISION)
        chunk_head = (first_chunk + chunk) * H + h
        if KEEP:
            store_tile(r_ptr + values, r.to(r_ptr.dtype.element_ty), ok, v_ok, EVEN, EVEN_V)
            spot = states_ptr + chunk_head * (K * V) + state_spot
            store_tile(spot, state.to(states_ptr.dtype.element_ty), k_ok, v_ok, EVEN_K, EVEN_V)
        x = r * beta[:, None]
        if OUTPUT:
            q = load_tile(q_base + first * q_t + (row[:, None] * q_t + ik[None, :]), ok, k_ok, EVEN, EVEN_K)
            out = tl.dot(q, s, input_precision=PRECISION)
            if DECAY == 2:
                pairs = token * CHUNK + (row[:, None] * (H * CHUNK) + row[None, :])
                scores = load_tile(scores_ptr + pairs, ok, row < CHUNK, EVEN, True)
            else:
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                seen = row[:, None] >= row[None, :]
                if DECAY == 1:
                    out = out * from_start[:, None]
                    scores = scores * decays_between(G, G_low, seen, EXACT)
                else:
                    scores = tl.where(seen, scores, 0.0)
            out = tl.dot(scores.to(w.dtype), x.to(w.dtype), out, input_precision=PRECISION)
            store_tile(o_ptr + values, (out * scale).to(o_ptr.dtype.element_ty), ok, v_ok, EVEN, EVEN_V)
        if DECAY == 1:
            state = state * over_chunk
            x = x * to_end[:, None]
        if DECAY == 2:
            state = state * tl.load(decay_ptr + chunk_head * K + ik, mask=k_ok, other=0.0)[:, None]
        state = tl.dot(tl.trans(k), x.to(w.dtype), state, input_precision=PRECISION)

    if END:
        end = end_ptr + (n * H + h) * (K * V) + state_spot
        tl.store(end, state, mask=k_ok[:, None] & v_ok[None, :])


# fmt: off
@triton.jit(do_not_specialize=["T"])
def _scan_back(
    q_ptr, k_ptr, w_ptr, m_ptr, do_ptr, beta_ptr, scores_ptr, decay_ptr, dv_ptr, dstates_ptr, dend_ptr, dstart_ptr,
    cu_ptr, cu_chunks_ptr, T, H: tl.constexpr, scale, q_b, q_t: tl.constexpr, q_h, k_b, k_t: tl.constexpr, k_h,
    o_b, o_t: tl.constexpr, o_h, b_b, b_t: tl.constexpr, b_h, g_b, g_t: tl.constexpr, g_h, s_n, s_h, s_k, s_v,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, START: tl.constexpr, END: tl.constexpr, VARLEN: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """dv, and the gradient of the state each chunk ends with. START: from `dend`. END: write that of the first state.

    DECAY as in `_scan`.
    """
    blocks: tl.constexpr = (V + V_BLOCK - 1) // V_BLOCK
    EVEN_K: tl.constexpr = K == K_BLOCK
    EVEN_V: tl.constexpr = V % V_BLOCK == 0
    pid = tl.program_id(0)
    block = pid % blocks
    rest = pid // blocks
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
    row = tl.arange(0, CHUNK)
    ik = tl.arange(0, K_BLOCK)
    iv = block * V_BLOCK + tl.arange(0, V_BLOCK)
    k_ok = ik < K
    v_ok = iv < V
    q_base = q_ptr + batch * q_b + first_row * q_t + h * q_h
    k_base = k_ptr + batch * k_b + first_row * k_t + h * k_h
    do_base = do_ptr + batch * o_b + first_row * o_t + h * o_h
    beta_base = beta_ptr + batch * b_b + first_row * b_t + h * b_h
    if DECAY == 1:
        g_base = decay_ptr + batch * g_b + first_row * g_t + h * g_h
    start_token = (batch * T + first_row) * H + h
    state_spot = ik[:, None] * V + iv[None, :]

    dstate = tl.zeros([K_BLOCK, V_BLOCK], tl.float32)
    if START:
        source = dend_ptr + n * s_n + h * s_h + ik[:, None] * s_k + iv[None, :] * s_v
        dstate = tl.load(source, mask=k_ok[:, None] & v_ok[None, :], other=0.0).to(tl.float32)

    count = tl.cdiv(length, CHUNK)
    for i in range(0, count):
        chunk = count - 1 - i
        ok = chunk * CHUNK + row < length
        first = n * 0 + chunk * CHUNK
        token = start_token + first * H
        pairs = token * CHUNK + (row[:, None] * (H * CHUNK) + row[None, :])
        q = load_tile(q_base + first * q_t + (row[:, None] * q_t + ik[None, :]), ok, k_ok, EVEN, EVEN_K)
        k = load_tile(k_base + first * k_t + (row[:, None] * k_t + ik[None, :]), ok, k_ok, EVEN, EVEN_K)
        do = load_tile(do_base + first * o_t + (row[:, None] * o_t + iv[None, :]), ok, v_ok, EVEN, EVEN_V)
        beta = tl.load(beta_base + first * b_t + row * b_t, mask=ok, other=0.0)
        if DECAY == 2:
            scores = load_tile(scores_ptr + pairs, ok, row < CHUNK, EVEN, True)
        else:
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            seen = row[:, None] >= row[None, :]
            if DECAY == 1:
                g = tl.load(g_base + first * g_t + row * g_t, mask=ok, other=0.0)
                G, G_low, from_start, to_end, over_chunk = token_decays(g, EXACT)
                scores = scores * (decays_between(G, G_low, seen, EXACT) * scale)
            else:
                scores = tl.where(seen, scores * scale, 0.0)

        chunk_head = (first_chunk + chunk) * H + h
        ds = dstate.to(q.dtype)
        spot = dstates_ptr + chunk_head * (K * V) + state_spot
        store_tile(spot, ds.to(dstates_ptr.dtype.element_ty), k_ok, v_ok, EVEN_K, EVEN_V)
        dr = tl.dot(k, ds, input_precision=PRECISION)
        if DECAY == 1:
            dr = dr * to_end[:, None]
        dr = tl.dot(tl.trans(scores.to(q.dtype)), do, dr, input_precision=PRECISION)
        dr = (dr * beta[:, None]).to(q.dtype)
        m = load_tile(m_ptr + pairs, ok, row < CHUNK, EVEN, True)
        dv = tl.dot(tl.trans(m), dr, input_precision=PRECISION)
        values = token * V + (row[:, None] * (H * V) + iv[None, :])
        store_tile(dv_ptr + values, dv.to(dv_ptr.dtype.element_ty), ok, v_ok, EVEN, EVEN_V)

        w = load_tile(w_ptr + token * K + (row[:, None] * (H * K) + ik[None, :]), ok, k_ok, EVEN, EVEN_K)
        x = do.to(tl.float32) * scale
        if DECAY == 1:
            dstate = dstate * over_chunk
            x = x * from_start[:, None]
        if DECAY == 2:
            dstate = dstate * tl.load(decay_ptr + chunk_head * K + ik, mask=k_ok, other=0.0)[:, None]
        dstate = tl.dot(tl.trans(q), x.to(q.dtype), dstate, input_precision=PRECISION)
        dstate = tl.dot(tl.trans(w), -dr, dstate, input_precision=PRECISION)

    if END:
        end = dstart_ptr + (n * H + h) * (K * V) + state_spot
        tl.store(end, dstate, mask=k_ok[:, None] & v_ok[None, :])


def _decay(ready: Prepared, g: Tensor | None) -> tuple[Tensor | None, int, tuple[int, ...]]:
    """The decay a scan reads, its kind and strides."""
    if ready.total is not None:
        return ready.total, 2, (0, 0, 0)
    return g, 0 if g is None else 1, (0, 0, 0) if g is None else g.stride()


def scan(
    packing: Packing,
    ready: Prepared,
    beta: Tensor,
    g: Tensor | None,
    start: Tensor | None,
    *,
    o: Tensor | None = None,
    end: Tensor | None = None,
    errors: Tensor | None = None,
    states: Tensor | None = None,
) -> None:
    """Launch `_scan`; errors [B,T,H,V] and states [chunks,H,K,V] come together. o and end are dense."""
    q, k = ready.q, ready.k
    (_, T, H, K), V = k.shape, ready.u.shape[3]
    launch = table.scan_launch(K, V, k.dtype.itemsize)
    decay, mode, strides = _decay(ready, g)
    fitting.launch(
        _scan,
        (packing.sequences * H * triton.cdiv(V, launch.block),),
        q,
        k,
        ready.w,
        ready.u,
        beta,
        ready.scores,
        decay,
        o,
        errors,
        states,
        start,
        end,
        packing.cu,
        packing.cu_chunks,
        T,
        H,
        ready.scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *beta.stride(),
        *strides,
        *((0, 0, 0, 0) if start is None else start.stride()),
        K=K,
        V=V,
        K_BLOCK=padded(K, k.dtype.itemsize),
        V_BLOCK=launch.block,
        CHUNK=CHUNK,
        DECAY=mode,
        OUTPUT=o is not None,
        KEEP=states is not None,
        START=start is not None,
        END=end is not None,
        VARLEN=packing.varlen,
        EVEN=packing.even,
        EXACT=k.dtype == torch.float32,
        PRECISION=dot_precision(k.dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def scan_back(
    packing: Packing,
    ready: Prepared,
    beta: Tensor,
    g: Tensor | None,
    do: Tensor,
    dend: Tensor | None,
    *,
    dv: Tensor,
    dstates: Tensor,
    dstart: Tensor | None,
) -> None:
    """Launch `_scan_back`; dv, dstates [chunks,H,K,V] and dstart are dense, `ready` has M."""
    q, k = ready.q, ready.k
    (_, T, H, K), V = k.shape, do.shape[3]
    launch = table.scan_launch(K, V, k.dtype.itemsize, backward=True)
    decay, mode, strides = _decay(ready, g)
    fitting.launch(
        _scan_back,
        (packing.sequences * H * triton.cdiv(V, launch.block),),
        q,
        k,
        ready.w,
        ready.m,
        do,
        beta,
        ready.scores,
        decay,
        dv,
        dstates,
        dend,
        dstart,
        packing.cu,
        packing.cu_chunks,
        T,
        H,
        ready.scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *do.stride()[:3],
        *beta.stride(),
        *strides,
        *((0, 0, 0, 0) if dend is None else dend.stride()),
        K=K,
        V=V,
        K_BLOCK=padded(K, k.dtype.itemsize),
        V_BLOCK=launch.block,
        CHUNK=CHUNK,
        DECAY=mode,
        START=dend is not None,
        END=dstart is not None,
        VARLEN=packing.varlen,
        EVEN=packing.even,
        EXACT=k.dtype == torch.float32,
        PRECISION=dot_precision(k.dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
