"""What the delta rule's chunks need and does not depend on the state: M, W = M (K ⊙ e^G) and U = M V.

M = (I + tril(A, −1) diag(β))⁻¹ with A_ij = Σ_d k_id k_jd e^{G_id − G_jd}; see `chunked.py`. A decay per channel takes
A and K ⊙ e^G from linear attention's `prepare`, with keys in the place of queries.

Bounds per token and head in 16 bits: 2K + 2V bytes read and as many written (2C more for M); 4·C·K + 2·C·V operations
and 20·C² for the inverse.
"""

# ruff: noqa: SIM102  (branches on compile-time constants read and compile best as statements)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.delta_rule import launch as table
from linearize.kernels.delta_rule.launch import CHUNK
from linearize.kernels.delta_rule.triton_tiles import decays_between, token_decays, unit_lower_inverse
from linearize.kernels.linear_attention.triton_common import Packing, dot_precision
from linearize.kernels.linear_attention.triton_prepare import prepare as prepare_decays
from linearize.kernels.linear_attention.triton_tiles import find_chunk, load_tile, store_tile


# fmt: off
@triton.jit(do_not_specialize=["N", "T"])
def _prepare(
    k_ptr, v_ptr, beta_ptr, g_ptr, scores_ptr, w_ptr, u_ptr, m_ptr, cu_ptr, cu_chunks_ptr, N, T, H: tl.constexpr,
    k_b, k_t: tl.constexpr, k_h, v_b, v_t: tl.constexpr, v_h, b_b, b_t: tl.constexpr, b_h, g_b, g_t: tl.constexpr, g_h,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    DECAY: tl.constexpr, KEEP: tl.constexpr, VARLEN: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    """W, U and (with KEEP) M of one chunk. DECAY: 0 none, 1 per token, 2 per channel: then `k` is K ⊙ e^G."""
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
    ok = chunk * CHUNK + row < length
    first = first_row + chunk * CHUNK
    token = (batch * T + first) * H + h
    k_base = k_ptr + batch * k_b + h * k_h + first * k_t
    v_base = v_ptr + batch * v_b + h * v_h + first * v_t
    beta = tl.load(beta_ptr + batch * b_b + h * b_h + first * b_t + row * b_t, mask=ok, other=0.0)

    after = row[:, None] > row[None, :]
    pairs = token * CHUNK + (row[:, None] * (H * CHUNK) + row[None, :])
    if DECAY == 2:
        a = load_tile(scores_ptr + pairs, ok, row < CHUNK, EVEN, True).to(tl.float32)
    else:
        a = tl.zeros([CHUNK, CHUNK], tl.float32)
        for k0 in range(0, K, K_BLOCK):
            ik = k0 + tl.arange(0, K_BLOCK)
            k = load_tile(k_base + (row[:, None] * k_t + ik[None, :]), ok, ik < K, EVEN, EVEN_K)
            a = tl.dot(k, tl.trans(k), a, input_precision=PRECISION)
    if DECAY == 1:
        g = tl.load(g_ptr + batch * g_b + h * g_h + first * g_t + row * g_t, mask=ok, other=0.0)
        G, G_low, from_start, _, _ = token_decays(g, EXACT)
        a = a * decays_between(G, G_low, after, EXACT)
    n = tl.where(after, a * beta[None, :], 0.0)
    m = unit_lower_inverse(n, CHUNK, LEVELS, PRECISION).to(w_ptr.dtype.element_ty)
    if KEEP:
        store_tile(m_ptr + pairs, m, ok, row < CHUNK, EVEN, True)

    for k0 in range(0, K, K_BLOCK):
        ik = k0 + tl.arange(0, K_BLOCK)
        k = load_tile(k_base + (row[:, None] * k_t + ik[None, :]), ok, ik < K, EVEN, EVEN_K)
        if DECAY == 1:
            k = (k.to(tl.float32) * from_start[:, None]).to(k.dtype)
        w = tl.dot(m, k, input_precision=PRECISION)
        spot = w_ptr + token * K + (row[:, None] * (H * K) + ik[None, :])
        store_tile(spot, w.to(w_ptr.dtype.element_ty), ok, ik < K, EVEN, EVEN_K)
    for v0 in range(0, V, V_BLOCK):
        iv = v0 + tl.arange(0, V_BLOCK)
        v = load_tile(v_base + (row[:, None] * v_t + iv[None, :]), ok, iv < V, EVEN, EVEN_V)
        u = tl.dot(m, v, input_precision=PRECISION)
        spot = u_ptr + token * V + (row[:, None] * (H * V) + iv[None, :])
        store_tile(spot, u.to(u_ptr.dtype.element_ty), ok, iv < V, EVEN, EVEN_V)


class Prepared:
    """Inputs of the scans: q and k as they meet the state, scores and decay of a decay per channel, W, U and M.

    With a decay per channel q carries the scale and the decay from the chunk's start, k the decay to its end, and
    `scores` [B,T,H,C] and `total` [chunks,H,K] are theirs; otherwise q and k are as given.
    """

    def __init__(
        self,
        packing: Packing,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        scale: float,
        keep: bool,
    ) -> None:
        (B, T, H, K), V = k.shape, v.shape[3]
        self.q, self.k, self.scale = q, k, scale
        self.scores = self.total = None
        keys, pairs, mode = k, None, 0 if g is None else 1
        if g is not None and g.dim() == 4:
            self.q, self.k, self.scores, self.total = prepare_decays(packing, q, k, g, None, scale)
            keys, _, pairs, _ = prepare_decays(packing, k, k, g, None, 1.0)
            self.scale, mode, g = 1.0, 2, None
        self.w = torch.empty(B, T, H, K, dtype=k.dtype, device=k.device)
        self.u = torch.empty(B, T, H, V, dtype=k.dtype, device=k.device)
        self.m = torch.empty(B, T, H, CHUNK, dtype=k.dtype, device=k.device) if keep else None
        launch, v_block = table.prepare_launch(K, V, k.dtype.itemsize)
        _prepare[(packing.chunks, H)](
            keys,
            v,
            beta,
            g,
            pairs,
            self.w,
            self.u,
            self.m,
            packing.cu,
            packing.cu_chunks,
            packing.sequences,
            T,
            H,
            *keys.stride()[:3],
            *v.stride()[:3],
            *beta.stride(),
            *((0, 0, 0) if g is None else g.stride()),
            K=K,
            V=V,
            K_BLOCK=launch.block,
            V_BLOCK=v_block,
            CHUNK=CHUNK,
            DECAY=mode,
            KEEP=keep,
            VARLEN=packing.varlen,
            EVEN=packing.even,
            EXACT=k.dtype == torch.float32,
            PRECISION=dot_precision(k.dtype),
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
