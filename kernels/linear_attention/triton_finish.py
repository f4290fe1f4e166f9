"""Gradients of a chunk with a decay per channel, from the states at its ends: all chunks at once.

A chunk's own part of the log decay's gradient needs no sum over time, so nothing cancels between chunks:

    dg_t = Σ_{i≥t} x_i − Σ_{j≥t} y_j + Σ_{j<t} z_j + Σ_v S ⊙ decay ⊙ dS

with x_i = q_i ⊙ dq_i, y_j = k_j ⊙ dk_j inside the chunk and z_j = k_j ⊙ dk_j towards later chunks.

Bounds per token and head in 16 bits: 8K + 4V + 4·K·V/C bytes read and 8K written; 6·C·K + 2·C·V + 4·K·V operations and
12·C·K for sums over rows.
"""

# ruff: noqa: SIM102  (branches on compile-time constants read and compile best as statements)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels import fitting
from linearize.kernels.linear_attention import launch as table
from linearize.kernels.linear_attention.launch import CHUNK
from linearize.kernels.linear_attention.triton_common import Packing, dot_precision, piece_dtype, wide_dtype
from linearize.kernels.linear_attention.triton_tiles import (
    FLOOR,
    SPAN,
    VANISHED,
    WEAK,
    centred,
    decay_to_end,
    find_chunk,
    halved,
    load_tile,
    log_decays,
    lower_halves,
    lower_triangles,
    store_tile,
    sum_rows,
    weakest,
    whole,
)


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


# fmt: off
@triton.jit(do_not_specialize=["N", "T"])
def _finish(
    q_ptr, k_ptr, v_ptr, g_ptr, u_ptr, do_ptr, states_ptr, dstates_ptr, total_ptr, dq_ptr, dk_ptr, dg_ptr, du_ptr,
    cu_ptr, cu_chunks_ptr, N, T, H: tl.constexpr, scale, q_b, q_t: tl.constexpr, q_h, k_b, k_t: tl.constexpr, k_h,
    v_b, v_t: tl.constexpr, v_h, do_b, do_t: tl.constexpr, do_h, g_b, g_t: tl.constexpr, g_h, g_k: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    BONUS: tl.constexpr, DECAY_GRADIENT: tl.constexpr, VARLEN: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """dq, dk, dg (and the bonus's gradient, per chunk) of K_BLOCK channels of one chunk.

    GROUP chunks one after another; in 16 bits only those that `_finish_weak` could not take.
    """
    EVEN_K: tl.constexpr = K % K_BLOCK == 0
    EVEN_V: tl.constexpr = V % V_BLOCK == 0
    LEVELS: tl.constexpr = 6
    tl.static_assert(CHUNK == 1 << LEVELS)
    blocks: tl.constexpr = (K + K_BLOCK - 1) // K_BLOCK
    block = tl.program_id(0) % blocks
    group = tl.program_id(0) // blocks
    h = tl.program_id(1).to(tl.int64)
    ik = block * K_BLOCK + tl.arange(0, K_BLOCK)
    k_ok = ik < K
    chunks = tl.load(cu_chunks_ptr + N) if VARLEN else N * tl.cdiv(T, CHUNK)
    if not EXACT:
        indices = tl.minimum(group * GROUP + tl.arange(0, GROUP), chunks - 1).to(tl.int64)
        group_kept = total_ptr + (indices[:, None] * H + h) * K + ik[None, :]
        group_kept = tl.load(group_kept, mask=k_ok[None, :], other=1.0)
        if tl.min(tl.min(group_kept, 1), 0) > WEAK:
            return
    for i in range(0, GROUP):
        index = group * GROUP + i
        mine = index < chunks
        if not EXACT:
            kept = total_ptr + (tl.minimum(index, chunks - 1).to(tl.int64) * H + h) * K + ik
            mine = mine & (tl.min(tl.load(kept, mask=k_ok, other=1.0), 0) <= WEAK)
        if mine:
            batch, first_row, length, chunk = find_chunk(index, N, T, cu_ptr, cu_chunks_ptr, CHUNK, VARLEN)
            row = tl.arange(0, CHUNK)
            t = chunk * CHUNK + row
            ok = t < length
            first = first_row + chunk * CHUNK
            do_base = do_ptr + batch * do_b + h * do_h + first * do_t + row[:, None] * do_t
            v_base = v_ptr + batch * v_b + h * v_h + first * v_t + row[:, None] * v_t
            dscores = tl.zeros([CHUNK, CHUNK], tl.float32)
            for v0 in range(0, V, V_BLOCK):
                iv = v0 + tl.arange(0, V_BLOCK)
                v_ok = iv < V
                do = load_tile(do_base + iv[None, :], ok, v_ok, EVEN, EVEN_V)
                v = load_tile(v_base + iv[None, :], ok, v_ok, EVEN, EVEN_V)
                dscores = tl.dot(do, tl.trans(v), dscores, input_precision=PRECISION)
            own = row[:, None] == row[None, :]
            dscores = dscores * scale
            diagonal = tl.sum(tl.where(own, dscores, 0.0), 1)
            dscores = tl.where(row[:, None] > row[None, :], dscores, 0.0)

            # Pairs inside the chunk.
            q = load_tile(
                q_ptr + batch * q_b + h * q_h + first * q_t + (row[:, None] * q_t + ik[None, :]),
                ok,
                k_ok,
                EVEN,
                EVEN_K,
            )
            k = load_tile(
                k_ptr + batch * k_b + h * k_h + first * k_t + (row[:, None] * k_t + ik[None, :]),
                ok,
                k_ok,
                EVEN,
                EVEN_K,
            )
            g_spot = g_ptr + batch * g_b + h * g_h + first * g_t + (row[:, None] * g_t + ik[None, :] * g_k)
            g = load_tile(g_spot, ok, k_ok, EVEN, EVEN_K)
            g = tl.maximum(g, FLOOR)
            q_sum, q_low, k_sum, k_low = log_decays(g, BONUS, EXACT)
            total = tl.sum(g, 0)
            if tl.min(total, 0) > -SPAN:
                fq, fk = centred(q_sum, q_low, k_sum, k_low, g, CHUNK, CHUNK, K_BLOCK, EXACT)
                dq, dk, dg = _pair_gradients(dscores, q, k, fq, fk, WIDE, PRECISION)
            else:
                dq = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                dk = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                dg = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                level = 0
                if weakest(g, 16, CHUNK, K_BLOCK) > -SPAN:
                    fq, fk = centred(q_sum, q_low, k_sum, k_low, g, 16, CHUNK, K_BLOCK, EXACT)
                    part = tl.where(lower_triangles(row, 16), dscores, 0.0)
                    dq, dk, dg = _pair_gradients(part, q, k, fq, fk, WIDE, PRECISION)
                    level = 4
                while level < LEVELS:
                    fq, fk = halved(q_sum, q_low, k_sum, k_low, 1 << level, CHUNK, K_BLOCK, EXACT)
                    part = tl.where(lower_halves(row, 1 << level), dscores, 0.0)
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
                do = load_tile(do_base + iv[None, :], ok, v_ok, EVEN, EVEN_V)
                v = load_tile(v_base + iv[None, :], ok, v_ok, EVEN, EVEN_V)
                s = load_tile(states_ptr + state_base + iv[None, :], k_ok, v_ok, EVEN_K, EVEN_V)
                ds = load_tile(dstates_ptr + state_base + iv[None, :], k_ok, v_ok, EVEN_K, EVEN_V)
                dq_state = tl.dot(do, tl.trans(s), dq_state, input_precision=PRECISION)
                dk_state = tl.dot(v, tl.trans(ds), dk_state, input_precision=PRECISION)
                if DECAY_GRADIENT:
                    through += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
            dq_state = dq_state * tl.exp(whole(q_sum, q_low, EXACT)) * scale
            dk_state = dk_state * tl.exp(decay_to_end(k_sum, k_low, g, EXACT))
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
                dg = tl.where(g < VANISHED, 0.0, dg)
                store_tile(dg_ptr + wide, dg, ok, k_ok, EVEN, EVEN_K)
            if BONUS:
                u = tl.load(u_ptr + h * K + ik, mask=k_ok, other=0.0)
                du = tl.sum(q * k * diagonal[:, None], 0)
                tl.store(du_ptr + (index.to(tl.int64) * H + h) * K + ik, du, mask=k_ok)
                dq += diagonal[:, None] * k * u[None, :]
                dk += diagonal[:, None] * q * u[None, :]
            else:
                dq += diagonal[:, None] * k
                dk += diagonal[:, None] * q
            store_tile(dq_ptr + wide, dq.to(dq_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)
            store_tile(dk_ptr + wide, dk.to(dk_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)


# fmt: off
@triton.jit(do_not_specialize=["N", "T"])
def _finish_weak(
    q_ptr, k_ptr, v_ptr, g_ptr, u_ptr, do_ptr, states_ptr, dstates_ptr, total_ptr, dq_ptr, dk_ptr, dg_ptr, du_ptr,
    cu_ptr, cu_chunks_ptr, N, T, H: tl.constexpr, scale, q_b, q_t: tl.constexpr, q_h, k_b, k_t: tl.constexpr, k_h,
    v_b, v_t: tl.constexpr, v_h, do_b, do_t: tl.constexpr, do_h, g_b, g_t: tl.constexpr, g_h, g_k: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    BONUS: tl.constexpr, DECAY_GRADIENT: tl.constexpr, VARLEN: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """`_finish` without branches, right where the decay over the chunk is above WEAK; `_finish` does the others."""
    EVEN_K: tl.constexpr = K % K_BLOCK == 0
    EVEN_V: tl.constexpr = V % V_BLOCK == 0
    blocks: tl.constexpr = (K + K_BLOCK - 1) // K_BLOCK
    block = tl.program_id(0) % blocks
    index = tl.program_id(0) // blocks
    h = tl.program_id(1).to(tl.int64)
    if VARLEN:
        if index >= tl.load(cu_chunks_ptr + N):
            return
    batch, first_row, length, chunk = find_chunk(index, N, T, cu_ptr, cu_chunks_ptr, CHUNK, VARLEN)
    row = tl.arange(0, CHUNK)
    t = chunk * CHUNK + row
    ok = t < length
    first = first_row + chunk * CHUNK
    ik = block * K_BLOCK + tl.arange(0, K_BLOCK)
    k_ok = ik < K
    do_base = do_ptr + batch * do_b + h * do_h + first * do_t + row[:, None] * do_t
    v_base = v_ptr + batch * v_b + h * v_h + first * v_t + row[:, None] * v_t
    dscores = tl.zeros([CHUNK, CHUNK], tl.float32)
    dq = tl.zeros([CHUNK, K_BLOCK], tl.float32)
    dk = tl.zeros([CHUNK, K_BLOCK], tl.float32)
    through = tl.zeros([K_BLOCK], tl.float32)
    state_base = (index.to(tl.int64) * H + h) * (K * V) + ik[:, None] * V
    for v0 in range(0, V, V_BLOCK):
        iv = v0 + tl.arange(0, V_BLOCK)
        v_ok = iv < V
        do = load_tile(do_base + iv[None, :], ok, v_ok, EVEN, EVEN_V)
        v = load_tile(v_base + iv[None, :], ok, v_ok, EVEN, EVEN_V)
        s = load_tile(states_ptr + state_base + iv[None, :], k_ok, v_ok, EVEN_K, EVEN_V)
        ds = load_tile(dstates_ptr + state_base + iv[None, :], k_ok, v_ok, EVEN_K, EVEN_V)
        dscores = tl.dot(do, tl.trans(v), dscores, input_precision=PRECISION)
        dq = tl.dot(do, tl.trans(s), dq, input_precision=PRECISION)
        dk = tl.dot(v, tl.trans(ds), dk, input_precision=PRECISION)
        if DECAY_GRADIENT:
            through += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)

    q = load_tile(
        q_ptr + batch * q_b + h * q_h + first * q_t + (row[:, None] * q_t + ik[None, :]),
        ok,
        k_ok,
        EVEN,
        EVEN_K,
    )
    k = load_tile(
        k_ptr + batch * k_b + h * k_h + first * k_t + (row[:, None] * k_t + ik[None, :]),
        ok,
        k_ok,
        EVEN,
        EVEN_K,
    )
    g_spot = g_ptr + batch * g_b + h * g_h + first * g_t + (row[:, None] * g_t + ik[None, :] * g_k)
    g = load_tile(g_spot, ok, k_ok, EVEN, EVEN_K)
    g = tl.maximum(g, FLOOR)
    middle = 0.5 * tl.sum(g, 0)
    half = tl.exp(middle)[None, :]
    k_sum = sum_rows((row[:, None] >= row[None, :]).to(PIECE), g, PIECE)
    q_sum = k_sum
    if BONUS:
        q_sum = sum_rows((row[:, None] > row[None, :]).to(PIECE), g, PIECE)
    fq = tl.exp(q_sum - middle[None, :])
    fk = tl.exp(middle[None, :] - k_sum)
    dscores = dscores * scale
    if BONUS:
        diagonal = tl.sum(tl.where(row[:, None] == row[None, :], dscores, 0.0), 1)
        dscores = tl.where(row[:, None] > row[None, :], dscores, 0.0)
        u = tl.load(u_ptr + h * K + ik, mask=k_ok, other=0.0)
        du = tl.sum(q.to(tl.float32) * k.to(tl.float32) * diagonal[:, None], 0)
        tl.store(du_ptr + (index.to(tl.int64) * H + h) * K + ik, du, mask=k_ok)
    else:  # the diagonal's share of the log decay's gradient cancels
        dscores = tl.where(row[:, None] >= row[None, :], dscores, 0.0)
    dscores = dscores.to(WIDE)
    wide = ((batch * T + first) * H + h) * K + (row[:, None] * (H * K) + ik[None, :])

    # Queries first, then keys: fewer tiles are alive at a time. As in `_pair_gradients`, both sides of the log decay's
    # gradient are made of the same rounded factors.
    q_wide = (q.to(tl.float32) * fq).to(WIDE)
    k_wide = (k.to(tl.float32) * fk).to(WIDE)
    pairs = tl.dot(dscores, k_wide, input_precision=PRECISION)
    dq = dq * (fq * half * scale)
    dg = pairs * q_wide.to(tl.float32) + dq * q.to(tl.float32)
    dq += pairs * fq
    if BONUS:
        beside = q.to(tl.float32) * dq
        dq += diagonal[:, None] * k.to(tl.float32) * u[None, :]
    store_tile(dq_ptr + wide, dq.to(dq_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)

    pairs = tl.dot(tl.trans(dscores), q_wide, input_precision=PRECISION)
    dk = dk * (fk * half)
    dg -= pairs * k_wide.to(tl.float32)
    last = (row == CHUNK - 1) | (t == length - 1)
    z = tl.where(last[:, None], 0.0, dk * k.to(tl.float32))
    dk += pairs * fk
    if BONUS:
        dk += diagonal[:, None] * q.to(tl.float32) * u[None, :]
    store_tile(dk_ptr + wide, dk.to(dk_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)
    if DECAY_GRADIENT:
        dg = sum_rows((row[:, None] <= row[None, :]).to(PIECE), dg, PIECE)
        dg += sum_rows((row[:, None] > row[None, :]).to(PIECE), z, PIECE) + half * half * through[None, :]
        if BONUS:
            dg -= beside
        store_tile(dg_ptr + wide, dg, ok, k_ok, EVEN, EVEN_K)


def finish(
    packing: Packing,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    bonus: Tensor | None,
    scale: float,
    do: Tensor,
    states: Tensor,
    dstates: Tensor,
    total: Tensor,
    want_dg: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dg [B,T,H,K] and dbonus [H,K] from the states [chunks,H,K,V] of chunks and their gradients."""
    (B, T, H, K), V = q.shape, v.shape[3]
    dq, dk = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    dg = torch.empty(B, T, H, K, dtype=torch.float32, device=q.device) if want_dg else None
    du = torch.zeros(packing.chunks, H, K, dtype=torch.float32, device=q.device) if bonus is not None else None
    exact = q.dtype == torch.float32
    choices = [(_finish, 1 if exact else table.GROUP, *table.finish_launch(K, V, q.dtype.itemsize))]
    if not exact:  # the second kernel redoes the chunks whose decay is too strong for the first
        choices.insert(0, (_finish_weak, 1, *table.finish_weak_launch(K, V)))
    for kernel, group, launch, v_block in choices:
        fitting.launch(
            kernel,
            (triton.cdiv(packing.chunks, group) * triton.cdiv(K, launch.block), H),
            q,
            k,
            v,
            g,
            bonus,
            do,
            states,
            dstates,
            total,
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
            *g.stride(),
            K=K,
            V=V,
            K_BLOCK=launch.block,
            V_BLOCK=v_block,
            CHUNK=CHUNK,
            BONUS=bonus is not None,
            DECAY_GRADIENT=want_dg,
            VARLEN=packing.varlen,
            EVEN=packing.even,
            EXACT=exact,
            PIECE=piece_dtype(),
            GROUP=group,
            WIDE=wide_dtype(q.dtype),
            PRECISION=dot_precision(q.dtype),
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
    return dq, dk, dg, None if du is None else du.sum(0)
