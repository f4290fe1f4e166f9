"""The delta rule's gradients of a chunk from the states at its ends: all chunks at once.

With r the errors, S the state before the chunk and dS' the gradient of the one after it, q and k meet keys and states
as in linear attention, k twice: once as the query of r (whose output's gradient is −dv), once as the key of β r.

    dP_ij = scale · do_i · r_j  (j ≤ i)          dA_ij = −dv_i · r_j  (j < i)
    dq_i  = Σ_j dP_ij L_ij β_j k_j + scale · e^{G_i} S do_i
    dk_i  = Σ_j dA_ij L_ij β_j k_j − e^{G_i} S dv_i + β_i e_i
    e_j   = Σ_i L_ij (dP_ij q_i + dA_ij k_i) + e^{G_C − G_j} dS' r_j
    dβ_j  = k_j · e_j

with L_ij the decay from j to i. The log decay's gradient is linear attention's, with no sum over chunks:

    dg_t = Σ_{i≥t} x_i − Σ_{j≥t} y_j + Σ_{j<t} z_j + Σ_v S ⊙ e^{G_C} ⊙ dS'

with x_i = q_i dq_i and k_i times dk_i's query part, y_j = k_j β_j e_j inside the chunk and z_j = k_j β_j e_j towards
later chunks.

Bounds per token and head in 16 bits: 4K + 6V + 4·K·V/C bytes read and 4K written; 4·C·V + 8·C·K + 6·K·V operations.
"""

# ruff: noqa: SIM102  (branches on compile-time constants read and compile best as statements)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels import fitting
from linearize.kernels.delta_rule import launch as table
from linearize.kernels.delta_rule.launch import CHUNK
from linearize.kernels.delta_rule.triton_tiles import decays_between, token_decays
from linearize.kernels.linear_attention.triton_common import Packing, dot_precision, wide_dtype
from linearize.kernels.linear_attention.triton_tiles import (
    FLOOR,
    SPAN,
    VANISHED,
    centred,
    decay_to_end,
    find_chunk,
    halved,
    load_tile,
    log_decays,
    lower_halves,
    lower_triangles,
    store_tile,
    weakest,
    whole,
)


@triton.jit
def _pairs(dp, da, q, k, beta, fq, fk, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Inside a chunk, with decay factors fq of queries and fk of keys: dq, dk's query part, e, and x − y.

    x and y are made of the same rounded factors, so that pairs which cancel in their sums cancel exactly.
    """
    q_wide = (q * fq).to(WIDE)
    k_wide = (k * fq).to(WIDE)
    key_wide = (k * fk * beta[:, None]).to(WIDE)
    dp = dp.to(WIDE)
    da = da.to(WIDE)
    dq = tl.dot(dp, key_wide, input_precision=PRECISION)
    dk = tl.dot(da, key_wide, input_precision=PRECISION)
    e = tl.dot(tl.trans(dp), q_wide, input_precision=PRECISION)
    e = tl.dot(tl.trans(da), k_wide, e, input_precision=PRECISION)
    dg = dq * q_wide.to(tl.float32) + dk * k_wide.to(tl.float32) - e * key_wide.to(tl.float32)
    return dq * fq, dk * fq, e * fk, dg


# fmt: off
@triton.jit(do_not_specialize=["N", "T"])
def _finish(
    q_ptr, k_ptr, beta_ptr, g_ptr, r_ptr, do_ptr, dv_ptr, states_ptr, dstates_ptr, dq_ptr, dk_ptr, dbeta_ptr, dg_ptr,
    cu_ptr, cu_chunks_ptr, N, T, H: tl.constexpr, scale, q_b, q_t: tl.constexpr, q_h, k_b, k_t: tl.constexpr, k_h,
    o_b, o_t: tl.constexpr, o_h, b_b, b_t: tl.constexpr, b_h, g_b, g_t: tl.constexpr, g_h, g_k: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, DECAY_GRADIENT: tl.constexpr, VARLEN: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """dq, dk, dβ and dg of one chunk. DECAY: 0 none, 1 log decay per token, 2 per channel."""
    LEVELS: tl.constexpr = 6
    tl.static_assert(CHUNK == 1 << LEVELS)
    EVEN_K: tl.constexpr = K % K_BLOCK == 0
    EVEN_V: tl.constexpr = V % V_BLOCK == 0
    index = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    if VARLEN:
        if index >= tl.load(cu_chunks_ptr + N):
            return
    batch, first_row, length, chunk = find_chunk(index, N, T, cu_ptr, cu_chunks_ptr, CHUNK, VARLEN)
    row = tl.arange(0, CHUNK)
    t = chunk * CHUNK + row
    ok = t < length
    first = first_row + chunk * CHUNK
    token = (batch * T + first) * H + h
    beta = tl.load(beta_ptr + batch * b_b + h * b_h + first * b_t + row * b_t, mask=ok, other=0.0)
    do_base = do_ptr + batch * o_b + h * o_h + first * o_t + row[:, None] * o_t
    values = token * V + row[:, None] * (H * V)

    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    da = tl.zeros([CHUNK, CHUNK], tl.float32)
    for v0 in range(0, V, V_BLOCK):
        iv = v0 + tl.arange(0, V_BLOCK)
        do = load_tile(do_base + iv[None, :], ok, iv < V, EVEN, EVEN_V)
        r = tl.trans(load_tile(r_ptr + values + iv[None, :], ok, iv < V, EVEN, EVEN_V))
        dv = load_tile(dv_ptr + values + iv[None, :], ok, iv < V, EVEN, EVEN_V)
        dp = tl.dot(do, r, dp, input_precision=PRECISION)
        da = tl.dot(dv, r, da, input_precision=PRECISION)
    dp = dp * scale
    after = row[:, None] > row[None, :]
    diagonal = tl.sum(tl.where(row[:, None] == row[None, :], dp, 0.0), 1)
    if DECAY == 1:
        g = tl.load(g_ptr + batch * g_b + h * g_h + first * g_t + row * g_t, mask=ok, other=0.0)
        G, G_low, from_start, to_end, over_chunk = token_decays(g, EXACT)
        between = decays_between(G, G_low, after, EXACT)
        dp = dp * between
        da = -da * between
    else:
        dp = tl.where(after, dp, 0.0)
        da = tl.where(after, -da, 0.0)

    last = (row == CHUNK - 1) | (t == length - 1)  # its z counts for nothing, but may be large beside the others
    dbeta = tl.zeros([CHUNK], tl.float32)
    x_sum = tl.zeros([CHUNK], tl.float32)
    z_sum = tl.zeros([CHUNK], tl.float32)
    through_sum = 0.0
    for k0 in range(0, K, K_BLOCK):
        ik = k0 + tl.arange(0, K_BLOCK)
        k_ok = ik < K
        q_spot = q_ptr + batch * q_b + h * q_h + first * q_t + (row[:, None] * q_t + ik[None, :])
        k_spot = k_ptr + batch * k_b + h * k_h + first * k_t + (row[:, None] * k_t + ik[None, :])
        q = load_tile(q_spot, ok, k_ok, EVEN, EVEN_K).to(tl.float32)
        k = load_tile(k_spot, ok, k_ok, EVEN, EVEN_K).to(tl.float32)

        if DECAY == 2:
            g_spot = g_ptr + batch * g_b + h * g_h + first * g_t + (row[:, None] * g_t + ik[None, :] * g_k)
            g = tl.maximum(load_tile(g_spot, ok, k_ok, EVEN, EVEN_K), FLOOR)
            q_sum, q_low, k_sum, k_low = log_decays(g, False, EXACT)
            total = tl.sum(g, 0)
            if tl.min(total, 0) > -SPAN:
                fq, fk = centred(q_sum, q_low, k_sum, k_low, g, CHUNK, CHUNK, K_BLOCK, EXACT)
                dq, dk, e, dg = _pairs(dp, da, q, k, beta, fq, fk, WIDE, PRECISION)
            else:
                dq = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                dk = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                e = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                dg = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                level = 0
                if weakest(g, 16, CHUNK, K_BLOCK) > -SPAN:
                    fq, fk = centred(q_sum, q_low, k_sum, k_low, g, 16, CHUNK, K_BLOCK, EXACT)
                    near = lower_triangles(row, 16)
                    dp_near = tl.where(near, dp, 0.0)
                    da_near = tl.where(near, da, 0.0)
                    dq, dk, e, dg = _pairs(dp_near, da_near, q, k, beta, fq, fk, WIDE, PRECISION)
                    level = 4
                while level < LEVELS:
                    fq, fk = halved(q_sum, q_low, k_sum, k_low, 1 << level, CHUNK, K_BLOCK, EXACT)
                    far = lower_halves(row, 1 << level)
                    dp_far = tl.where(far, dp, 0.0)
                    da_far = tl.where(far, da, 0.0)
                    dq_, dk_, e_, dg_ = _pairs(dp_far, da_far, q, k, beta, fq, fk, WIDE, PRECISION)
                    dq += dq_
                    dk += dk_
                    e += e_
                    dg += dg_
                    level += 1
        else:
            dq, dk, e, dg = _pairs(dp, da, q, k, beta, 1.0, 1.0, WIDE, PRECISION)
        dq += diagonal[:, None] * beta[:, None] * k
        e += diagonal[:, None] * q

        # Towards the states at the chunk's two ends.
        dq_state = tl.zeros([CHUNK, K_BLOCK], tl.float32)
        dk_state = tl.zeros([CHUNK, K_BLOCK], tl.float32)
        e_state = tl.zeros([CHUNK, K_BLOCK], tl.float32)
        through = tl.zeros([K_BLOCK], tl.float32)
        state_base = (index.to(tl.int64) * H + h) * (K * V) + ik[:, None] * V
        for v0 in range(0, V, V_BLOCK):
            iv = v0 + tl.arange(0, V_BLOCK)
            v_ok = iv < V
            do = load_tile(do_base + iv[None, :], ok, v_ok, EVEN, EVEN_V)
            r = load_tile(r_ptr + values + iv[None, :], ok, v_ok, EVEN, EVEN_V)
            dv = load_tile(dv_ptr + values + iv[None, :], ok, v_ok, EVEN, EVEN_V)
            s = load_tile(states_ptr + state_base + iv[None, :], k_ok, v_ok, EVEN_K, EVEN_V)
            ds = load_tile(dstates_ptr + state_base + iv[None, :], k_ok, v_ok, EVEN_K, EVEN_V)
            dq_state = tl.dot(do, tl.trans(s), dq_state, input_precision=PRECISION)
            dk_state = tl.dot(dv, tl.trans(s), dk_state, input_precision=PRECISION)
            e_state = tl.dot(r, tl.trans(ds), e_state, input_precision=PRECISION)
            if DECAY_GRADIENT:
                through += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
        if DECAY == 2:
            start_decay = tl.exp(whole(q_sum, q_low, EXACT))
            dq_state = dq_state * (start_decay * scale)
            dk_state = dk_state * -start_decay
            e_state = e_state * tl.exp(decay_to_end(k_sum, k_low, g, EXACT))
        elif DECAY == 1:
            dq_state = dq_state * (from_start * scale)[:, None]
            dk_state = dk_state * -from_start[:, None]
            e_state = e_state * to_end[:, None]
        else:
            dq_state = dq_state * scale
            dk_state = -dk_state
        spot = token * K + (row[:, None] * (H * K) + ik[None, :])
        if DECAY_GRADIENT:
            x = dg + dq_state * q + dk_state * k
            z = tl.where(last[:, None], 0.0, e_state * k * beta[:, None])
            if DECAY == 2:
                dg = tl.cumsum(x, 0, reverse=True) + tl.cumsum(z, 0) - z + (tl.exp(total) * through)[None, :]
                store_tile(dg_ptr + spot, tl.where(g < VANISHED, 0.0, dg), ok, k_ok, EVEN, EVEN_K)
            else:
                x_sum += tl.sum(x, 1)
                z_sum += tl.sum(z, 1)
                through_sum += tl.sum(through, 0)
        e += e_state
        dbeta += tl.sum(e * k, 1)
        dq += dq_state
        dk += dk_state + e * beta[:, None]
        store_tile(dq_ptr + spot, dq.to(dq_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)
        store_tile(dk_ptr + spot, dk.to(dk_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)

    tl.store(dbeta_ptr + token + row * H, dbeta, mask=ok)
    if DECAY_GRADIENT:
        if DECAY == 1:
            dg_t = tl.cumsum(x_sum, 0, reverse=True) + tl.cumsum(z_sum, 0) - z_sum + over_chunk * through_sum
            tl.store(dg_ptr + token + row * H, tl.where(g < VANISHED, 0.0, dg_t), mask=ok)


def finish(
    packing: Packing,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float,
    errors: Tensor,
    do: Tensor,
    dv: Tensor,
    states: Tensor,
    dstates: Tensor,
    want_dg: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dβ [B,T,H] and dg (like g) from errors and dv [B,T,H,V], states and dstates [chunks,H,K,V]."""
    (B, T, H, K), V = q.shape, do.shape[3]
    dq, dk = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    dbeta = torch.empty(B, T, H, dtype=torch.float32, device=q.device)
    dg = None
    if want_dg and g is not None:
        dg = torch.empty(g.shape, dtype=torch.float32, device=q.device)
    launch, v_block = table.finish_launch(K, V, q.dtype.itemsize)
    fitting.launch(
        _finish,
        (packing.chunks, H),
        q,
        k,
        beta,
        g,
        errors,
        do,
        dv,
        states,
        dstates,
        dq,
        dk,
        dbeta,
        dg,
        packing.cu,
        packing.cu_chunks,
        packing.sequences,
        T,
        H,
        scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *do.stride()[:3],
        *beta.stride(),
        *((0, 0, 0, 0) if g is None else (*g.stride(), 0)[:4]),
        K=K,
        V=V,
        K_BLOCK=launch.block,
        V_BLOCK=v_block,
        CHUNK=CHUNK,
        DECAY=0 if g is None else g.dim() - 2,
        DECAY_GRADIENT=dg is not None,
        VARLEN=packing.varlen,
        EVEN=packing.even,
        EXACT=q.dtype == torch.float32,
        WIDE=wide_dtype(q.dtype),
        PRECISION=dot_precision(q.dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return dq, dk, dbeta, dg
