"""The running pairs on the GPU, backwards: both gated scans, the rotation and the own pairs' logits in one pass.

Bounds per token and head, in elements of K: k, v, gate, q, k̃, ṽ, o, do and dq are read and four gradients written: 13, so
26·K bytes in 16 bits, for some 20·K operations: bound by memory bandwidth. k̃ and ṽ of the token before come from the
cache, as do inputs that heads share.

Suffixes as in `triton_own.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.rat_attention.triton_own import Heads, partners, rotation, tile


@triton.jit(do_not_specialize=["T", "segments", "seen"])
def _own_back(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    cos_ptr,
    sin_ptr,
    own_k_ptr,
    own_v_ptr,
    o_ptr,
    do_ptr,
    lse_ptr,
    logit_ptr,
    turned_ptr,
    slot_k_ptr,
    slot_v_ptr,
    extra_k_ptr,
    extra_v_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    T,
    segments,
    seen,
    scale,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    g_b,
    g_t,
    g_h,
    do_b,
    do_t,
    do_h,
    turned_b,
    turned_s,
    turned_h,
    H: tl.constexpr,
    G: tl.constexpr,
    Q_GROUP: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    G_GROUP: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    LOGITS: tl.constexpr,
    EXTRA: tl.constexpr,
):
    """Backwards through a tile of chunks: dq [B,T,H,K] and, per running head, dk, dv, dgate [B,T,G,K].

    turned: what attention over the summaries gives the turned q, [B, C·H, S−1, K] from the second chunk on; slot: what
    it gives the summaries' pairs, turned back already, [B,S−1,G,K] float32; EXTRA: what the running pairs get besides.
    """
    tiles = tl.cdiv(segments, ROWS)
    g_head = (tl.program_id(0) % G).to(tl.int64)
    segment = (tl.program_id(0) // G % tiles) * ROWS + tl.arange(0, ROWS)
    b = (tl.program_id(0) // G // tiles).to(tl.int64)
    i = tl.arange(0, K_BLOCK)
    i_ok = i < K
    half: tl.constexpr = WIDTH // 2
    low = i < half
    partner = partners(i, half)
    paired = (i < WIDTH)[None, :]
    if WIDTH > 0:
        cos, _, back, alpha, beta = rotation(cos_ptr, sin_ptr, segment, segment < segments, i, partner, low, WIDTH)
    carry_k = tl.zeros([ROWS, K_BLOCK], tl.float32)
    carry_v = tl.zeros([ROWS, K_BLOCK], tl.float32)
    k_base = k_ptr + b * k_b + (g_head // K_GROUP) * k_h + i[None, :]
    v_base = v_ptr + b * v_b + (g_head // V_GROUP) * v_h + i[None, :]
    g_base = g_ptr + b * g_b + (g_head // G_GROUP) * g_h + i[None, :]
    summary = ((b * seen + segment.to(tl.int64)) * G + g_head)[:, None] * K + i[None, :]
    summarised = (segment < seen)[:, None] & i_ok[None, :]
    for step in range(0, C):
        place = C - 1 - step
        t = (segment * C + place).to(tl.int64)
        real = t < T
        ok = real[:, None] & i_ok[None, :]
        out = ((b * T + t) * G + g_head)[:, None] * K
        own_v = tl.load(own_v_ptr + out + i[None, :], mask=ok, other=0.0).to(tl.float32)
        own_k = tl.load(own_k_ptr + out + i[None, :], mask=ok, other=0.0).to(tl.float32)
        inner_k = own_k
        if WIDTH > 0:
            other = tl.load(own_k_ptr + out + partner[None, :], mask=ok & paired, other=0.0).to(tl.float32)
            inner_k = own_k * alpha + other * beta
        e_k = carry_k
        e_v = carry_v
        if EXTRA:
            e_k += tl.load(extra_k_ptr + out + i[None, :], mask=ok, other=0.0).to(tl.float32)
            e_v += tl.load(extra_v_ptr + out + i[None, :], mask=ok, other=0.0).to(tl.float32)
        ends = summarised & (t % C == C - 1)[:, None]
        e_k += tl.load(slot_k_ptr + summary, mask=ends, other=0.0)
        e_v += tl.load(slot_v_ptr + summary, mask=ends, other=0.0)
        for r in range(0, H // G):
            h = g_head * (H // G) + r
            row = ((b * T + t) * H + h)[:, None] * K + i[None, :]
            o = tl.load(o_ptr + row, mask=ok, other=0.0).to(tl.float32)
            do = tl.load(do_ptr + b * do_b + h * do_h + t[:, None] * do_t + i[None, :], mask=ok, other=0.0)
            do = do.to(tl.float32)
            lse = tl.load(lse_ptr + (b * H + h) * T + t, mask=real, other=0.0)
            logit = tl.load(logit_ptr + (b * H + h) * T + t, mask=real, other=0.0)
            p = tl.exp(tl.minimum(logit - lse, 0.0))
            ds = p * (tl.sum(do * own_v, 1) - tl.sum(do * o, 1)) * scale
            e_v += p[:, None] * do
            at = q_ptr + b * q_b + t[:, None] * q_t + (h // Q_GROUP) * q_h
            inner_q = tl.load(at + i[None, :], mask=ok, other=0.0).to(tl.float32)
            later = ok & (segment > 0)[:, None]
            from_turned = turned_ptr + b * turned_b + (segment.to(tl.int64) - 1)[:, None] * turned_s
            from_turned += (t % C * H + h)[:, None] * turned_h
            dq = tl.load(from_turned + i[None, :], mask=later, other=0.0).to(tl.float32)
            if WIDTH > 0:
                other = tl.load(at + partner[None, :], mask=ok & paired, other=0.0).to(tl.float32)
                inner_q = inner_q * alpha + other * beta
                dq_p = tl.load(from_turned + partner[None, :], mask=later & paired, other=0.0).to(tl.float32)
                dq = dq * cos + dq_p * back
            e_k += ds[:, None] * inner_q
            dq += ds[:, None] * inner_k
            tl.store(dq_ptr + row, dq.to(dq_ptr.dtype.element_ty), mask=ok)
        k = tl.load(k_base + t[:, None] * k_t, mask=ok, other=0.0).to(tl.float32)
        v = tl.load(v_base + t[:, None] * v_t, mask=ok, other=0.0).to(tl.float32)
        g = tl.load(g_base + t[:, None] * g_t, mask=ok, other=0.0).to(tl.float32)
        if LOGITS:
            g = tl.sigmoid(g)
        g = tl.where(ok, g, 1.0)
        earlier = ok & (t % C > 0)[:, None]
        before_k = tl.load(own_k_ptr + out + i[None, :] - G * K, mask=earlier, other=0.0).to(tl.float32)
        before_v = tl.load(own_v_ptr + out + i[None, :] - G * K, mask=earlier, other=0.0).to(tl.float32)
        dg = e_k * (before_k - k) + e_v * (before_v - v)
        if LOGITS:
            dg = dg * g * (1.0 - g)
        tl.store(dk_ptr + out + i[None, :], ((1.0 - g) * e_k).to(dk_ptr.dtype.element_ty), mask=ok)
        tl.store(dv_ptr + out + i[None, :], ((1.0 - g) * e_v).to(dv_ptr.dtype.element_ty), mask=ok)
        tl.store(dg_ptr + out + i[None, :], dg.to(dg_ptr.dtype.element_ty), mask=ok)
        carry_k = g * e_k
        carry_v = g * e_v


def own_backward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    heads: Heads,
    tables: tuple[Tensor, Tensor] | None,
    own: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor],
    gained: tuple[Tensor, Tensor, Tensor],
    extra: tuple[Tensor, Tensor] | None,
    C: int,
    scale: float,
    *,
    logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q [B,T,H,K] and of k, v, gate [B,T,G,K].

    own: running pairs and own logits; outputs: o contiguous, do, log-sum-exp [B,H,T]; gained: gradients of the turned q
    and of the summaries; extra: those of the running pairs, contiguous.
    """
    q, k, v, g = inputs
    (B, T, _, K), H, G = q.shape, heads.H, heads.G
    key, value, logit = own
    o, do, lse = outputs
    turned, slot_k, slot_v = gained
    segments = -(-T // C)
    dq = q.new_empty(B, T, H, K)
    dk, dv, dg = (x.new_empty(B, T, G, K) for x in (k, v, g))
    options = tile("own back", K)
    _own_back[(-(-segments // options["ROWS"]) * B * G,)](
        *inputs,
        *(tables or (None, None)),
        key,
        value,
        o,
        do,
        lse,
        logit,
        turned,
        slot_k,
        slot_v,
        *(extra or (None, None)),
        dq,
        dk,
        dv,
        dg,
        T,
        segments,
        segments - 1,
        scale,
        *(s for x in inputs for s in x.stride()[:3]),
        *do.stride()[:3],
        turned.stride(0),
        turned.stride(2),
        turned.stride(1),
        **vars(heads),
        **options,
        C=C,
        K=K,
        WIDTH=0 if tables is None else tables[0].shape[1],
        LOGITS=logits,
        EXTRA=extra is not None,
    )
    return dq, dk, dv, dg
