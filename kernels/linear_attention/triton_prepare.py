"""What a chunk with a decay per channel needs and does not depend on the values: scores, and q and k with decay.

Bounds per token and head in 16 bits: 8K + 4K bytes read and 4K + 2C written; 2·C·K operations for the scores and twice
4·C·K for the sums of the log decay.
"""

# ruff: noqa: SIM102  (branches on compile-time constants read and compile best as statements)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.linear_attention import launch as table
from linearize.kernels.linear_attention.launch import CHUNK
from linearize.kernels.linear_attention.triton_common import Packing, dot_precision, piece_dtype, wide_dtype
from linearize.kernels.linear_attention.triton_tiles import (
    FLOOR,
    SPAN,
    WEAK,
    centred,
    decay_to_end,
    find_chunk,
    halved,
    load_tile,
    log_decays,
    lower_halves,
    lower_triangles,
    product,
    store_tile,
    sum_rows,
    weakest,
    whole,
)


# fmt: off
@triton.jit(do_not_specialize=["N", "T"])
def _prepare(
    q_ptr, k_ptr, g_ptr, u_ptr, q_out_ptr, k_out_ptr, scores_ptr, total_ptr, cu_ptr, cu_chunks_ptr, N, T,
    H: tl.constexpr, scale, q_b, q_t: tl.constexpr, q_h, k_b, k_t: tl.constexpr, k_h, g_b, g_t: tl.constexpr, g_h,
    g_k: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, CHUNK: tl.constexpr, BONUS: tl.constexpr,
    VARLEN: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, PIECE: tl.constexpr, K_ALL: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Scores of a chunk [T,H,C], and q and k carrying decay, for a decay per channel; the scale goes into q.

    GROUP chunks one after another; in 16 bits only those that `_prepare_weak` could not take.
    """
    LEVELS: tl.constexpr = 6
    tl.static_assert(CHUNK == 1 << LEVELS)
    EVEN_K: tl.constexpr = K % K_BLOCK == 0
    h = tl.program_id(1).to(tl.int64)
    chunks = tl.load(cu_chunks_ptr + N) if VARLEN else N * tl.cdiv(T, CHUNK)
    channel = tl.arange(0, K_ALL)
    if not EXACT:
        indices = tl.minimum(tl.program_id(0) * GROUP + tl.arange(0, GROUP), chunks - 1).to(tl.int64)
        group_kept = total_ptr + (indices[:, None] * H + h) * K + channel[None, :]
        group_kept = tl.load(group_kept, mask=channel[None, :] < K, other=1.0)
        if tl.min(tl.min(group_kept, 1), 0) > WEAK:
            return
    for i in range(0, GROUP):
        index = tl.program_id(0) * GROUP + i
        mine = index < chunks
        if not EXACT:
            kept = total_ptr + (tl.minimum(index, chunks - 1).to(tl.int64) * H + h) * K + channel
            mine = mine & (tl.min(tl.load(kept, mask=channel < K, other=1.0), 0) <= WEAK)
        if mine:
            batch, first_row, length, chunk = find_chunk(index, N, T, cu_ptr, cu_chunks_ptr, CHUNK, VARLEN)
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
                q = q.to(tl.float32)
                k = k.to(tl.float32)
                q_sum, q_low, k_sum, k_low = log_decays(g, BONUS, EXACT)
                total = tl.sum(g, 0)

                if BONUS:
                    u = tl.load(u_ptr + h * K + ik, mask=k_ok, other=0.0)
                    diagonal += tl.sum(q * k * u[None, :], 1)
                else:
                    diagonal += tl.sum(q * k, 1)

                if tl.min(total, 0) > -SPAN:
                    fq, fk = centred(q_sum, q_low, k_sum, k_low, g, CHUNK, CHUNK, K_BLOCK, EXACT)
                    strict += tl.where(row[:, None] > row[None, :], product(q * fq, k * fk, WIDE, PRECISION), 0.0)
                else:
                    level = 0
                    if weakest(g, 16, CHUNK, K_BLOCK) > -SPAN:
                        fq, fk = centred(q_sum, q_low, k_sum, k_low, g, 16, CHUNK, K_BLOCK, EXACT)
                        part = product(q * fq, k * fk, WIDE, PRECISION)
                        strict += tl.where(lower_triangles(row, 16), part, 0.0)
                        level = 4
                    while level < LEVELS:
                        fq, fk = halved(q_sum, q_low, k_sum, k_low, 1 << level, CHUNK, K_BLOCK, EXACT)
                        part = product(q * fq, k * fk, WIDE, PRECISION)
                        strict += tl.where(lower_halves(row, 1 << level), part, 0.0)
                        level += 1

                wide = (token * H + h) * K + (row[:, None] * (H * K) + ik[None, :])
                q = q * tl.exp(whole(q_sum, q_low, EXACT)) * scale
                k = k * tl.exp(decay_to_end(k_sum, k_low, g, EXACT))
                store_tile(q_out_ptr + wide, q.to(q_out_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)
                store_tile(k_out_ptr + wide, k.to(k_out_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)
                tl.store(total_ptr + (index.to(tl.int64) * H + h) * K + ik, tl.exp(total), mask=k_ok)

            own = row[:, None] == row[None, :]
            scores = tl.where(own, diagonal[:, None], strict) * scale
            spot = scores_ptr + (token * H + h) * CHUNK + (row[:, None] * (H * CHUNK) + row[None, :])
            if EVEN:
                tl.store(spot, scores.to(scores_ptr.dtype.element_ty))
            else:
                tl.store(spot, scores.to(scores_ptr.dtype.element_ty), mask=ok[:, None])


# fmt: off
@triton.jit(do_not_specialize=["N", "T"])
def _prepare_weak(
    q_ptr, k_ptr, g_ptr, u_ptr, q_out_ptr, k_out_ptr, scores_ptr, total_ptr, cu_ptr, cu_chunks_ptr, N, T,
    H: tl.constexpr, scale, q_b, q_t: tl.constexpr, q_h, k_b, k_t: tl.constexpr, k_h, g_b, g_t: tl.constexpr, g_h,
    g_k: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, CHUNK: tl.constexpr, BONUS: tl.constexpr,
    VARLEN: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr, PIECE: tl.constexpr, K_ALL: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """`_prepare` without branches, right where the decay over the chunk is above WEAK; `_prepare` does the others."""
    EVEN_K: tl.constexpr = K % K_BLOCK == 0
    index = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    if VARLEN:
        if index >= tl.load(cu_chunks_ptr + N):
            return
    batch, first_row, length, chunk = find_chunk(index, N, T, cu_ptr, cu_chunks_ptr, CHUNK, VARLEN)
    row = tl.arange(0, CHUNK)
    ok = chunk * CHUNK + row < length
    first = first_row + chunk * CHUNK
    token = batch * T + first
    until = (row[:, None] >= row[None, :]).to(PIECE)
    before = (row[:, None] > row[None, :]).to(PIECE)

    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    diagonal = tl.zeros([CHUNK], tl.float32)
    for k0 in tl.static_range(0, K, K_BLOCK):
        ik = k0 + tl.arange(0, K_BLOCK)
        k_ok = ik < K
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
        total = tl.sum(g, 0)
        k_sum = sum_rows(until, g, PIECE)
        q_sum = k_sum
        if BONUS:
            q_sum = sum_rows(before, g, PIECE)
            u = tl.load(u_ptr + h * K + ik, mask=k_ok, other=0.0)
            diagonal += tl.sum(q.to(tl.float32) * k.to(tl.float32) * u[None, :], 1)
        # Exponents about the middle are at most 40 in size, and one factor makes them whole.
        middle = 0.5 * total
        half = tl.exp(middle)[None, :]
        wide = (token * H + h) * K + (row[:, None] * (H * K) + ik[None, :])
        q = q.to(tl.float32) * tl.exp(q_sum - middle[None, :])
        store_tile(q_out_ptr + wide, (q * (half * scale)).to(q_out_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)
        q = q.to(WIDE)
        k = k.to(tl.float32) * tl.exp(middle[None, :] - k_sum)
        store_tile(k_out_ptr + wide, (k * half).to(k_out_ptr.dtype.element_ty), ok, k_ok, EVEN, EVEN_K)
        scores = tl.dot(q, tl.trans(k.to(WIDE)), scores, input_precision=PRECISION)
        tl.store(total_ptr + (index.to(tl.int64) * H + h) * K + ik, tl.exp(total), mask=k_ok)

    if BONUS:
        scores = tl.where(row[:, None] == row[None, :], diagonal[:, None], scores)
    scores = tl.where(row[:, None] >= row[None, :], scores, 0.0) * scale
    spot = scores_ptr + (token * H + h) * CHUNK + (row[:, None] * (H * CHUNK) + row[None, :])
    if EVEN:
        tl.store(spot, scores.to(scores_ptr.dtype.element_ty))
    else:
        tl.store(spot, scores.to(scores_ptr.dtype.element_ty), mask=ok[:, None])


def prepare(
    packing: Packing, q: Tensor, k: Tensor, g: Tensor, bonus: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k carrying decay [B,T,H,K], scores [B,T,H,C] and the decay over each chunk [chunks,H,K]."""
    B, T, H, K = q.shape
    q_out, k_out = (
        torch.empty(B, T, H, K, dtype=q.dtype, device=q.device),
        torch.empty(B, T, H, K, dtype=k.dtype, device=q.device),
    )
    scores = torch.empty(B, T, H, CHUNK, dtype=q.dtype, device=q.device)
    total = torch.empty(packing.chunks, H, K, dtype=torch.float32, device=q.device)
    launch = table.prepare_launch(K, q.dtype.itemsize)
    exact = q.dtype == torch.float32
    # The second kernel redoes the chunks whose decay is too strong for the first; float32 takes the second alone.
    for kernel, group in ((_prepare, 1),) if exact else ((_prepare_weak, 1), (_prepare, table.GROUP)):
        kernel[(triton.cdiv(packing.chunks, group), H)](
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
            EXACT=exact,
            PIECE=piece_dtype(),
            K_ALL=triton.next_power_of_2(K),
            GROUP=group,
            WIDE=wide_dtype(q.dtype),
            PRECISION=dot_precision(q.dtype),
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
    return q_out, k_out, scores, total
