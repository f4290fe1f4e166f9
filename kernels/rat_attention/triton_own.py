"""The running pairs on the GPU: both gated scans, the rotation of q and the logits of the own pairs in one pass.

A program takes a tile of chunks of one head through their tokens, side by side, with the running key and value in
registers. The rotation needs no second pass: q and the running key of a token are turned by the same angles, so the
own pair's logit is `k̃ᵀ(RᵀR)q`, and RᵀR only mixes the two channels of a pair. The gate's sigmoid is taken here.

Bounds per token and head, in elements of K: the forward pass reads k, v and gate and writes k̃, ṽ and the turned q (which
is read once per group): 6, so 12·K bytes in 16 bits; a handful of operations for each. It is bound by memory bandwidth; heads
that share an input read it from the cache.

Suffixes: B batch, T time, H query heads, G heads of running pairs (H = G·R), K width, C chunk size, S chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.rat_attention.launch import TABLE


@triton.jit
def partners(i, half: tl.constexpr):
    """The other channel of each pair."""
    partner = tl.where(i < half, i + half, i - half)
    if half > 0 and half % 8 == 0:  # runs of eight stay runs: without the hint they are read one by one
        partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
    return partner


@triton.jit
def rotation(cos_ptr, sin_ptr, chunk, ok, i, partner, low, WIDTH: tl.constexpr):
    """Of a row per chunk: cos and signed sin for turning x, the same for turning back, and RᵀR's α and β."""
    turned = ok[:, None] & (i < WIDTH)[None, :]
    at = chunk[:, None] * WIDTH
    sign = tl.where(low, -1.0, 1.0)[None, :]
    cos = tl.load(cos_ptr + at + i[None, :], mask=turned, other=1.0)
    sin = tl.load(sin_ptr + at + i[None, :], mask=turned, other=0.0)
    cos_p = tl.load(cos_ptr + at + partner[None, :], mask=turned, other=1.0)
    sin_p = tl.load(sin_ptr + at + partner[None, :], mask=turned, other=0.0)
    return cos, sign * sin, -sign * sin_p, cos * cos + sin_p * sin_p, sign * (cos * sin - sin_p * cos_p)


@triton.jit(do_not_specialize=["T", "padded", "segments"])
def _own(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    start_k_ptr,
    start_v_ptr,
    turned_ptr,
    own_k_ptr,
    own_v_ptr,
    logit_ptr,
    end_k_ptr,
    end_v_ptr,
    T,
    padded,
    segments,
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
    START: tl.constexpr,
    END: tl.constexpr,
):
    """k̃, ṽ [B,T,G,K], turned q [B,padded,H,K] (zeros from T on), own logits [B,H,T] of a tile of chunks.

    START: row b has seen position[b] tokens and goes on from its running pair [B,G,K]; END: store the last pair.
    """
    tiles = tl.cdiv(segments, ROWS)
    g_head = (tl.program_id(0) % G).to(
        tl.int64
    )  # heads side by side: what they share, and rows of memory, are read together
    segment = (tl.program_id(0) // G % tiles) * ROWS + tl.arange(0, ROWS)
    b = (tl.program_id(0) // G // tiles).to(tl.int64)
    i = tl.arange(0, K_BLOCK)
    i_ok = i < K
    half: tl.constexpr = WIDTH // 2
    low = i < half
    partner = partners(i, half)
    paired = i < WIDTH
    lead = 0
    chunk = segment
    state_k = tl.zeros([ROWS, K_BLOCK], tl.float32)
    state_v = tl.zeros([ROWS, K_BLOCK], tl.float32)
    if START:
        position = tl.load(position_ptr + b)
        lead = (position % C).to(tl.int32)
        chunk = segment + (position // C).to(tl.int32)
        going = ((segment == 0) & (segment + lead > 0))[:, None] & i_ok[None, :]
        at = (b * G + g_head) * K + i[None, :] + segment[:, None] * 0
        state_k = tl.load(start_k_ptr + at, mask=going, other=0.0)
        state_v = tl.load(start_v_ptr + at, mask=going, other=0.0)
    if WIDTH > 0:
        reached = (segment < segments) & (segment * C - lead < T)
        cos, sin, _, alpha, beta = rotation(cos_ptr, sin_ptr, chunk, reached, i, partner, low, WIDTH)
    q_base = q_ptr + b * q_b
    k_base = k_ptr + b * k_b + (g_head // K_GROUP) * k_h + i[None, :]
    v_base = v_ptr + b * v_b + (g_head // V_GROUP) * v_h + i[None, :]
    g_base = g_ptr + b * g_b + (g_head // G_GROUP) * g_h + i[None, :]
    for step in range(0, C):
        t = (segment * C + step - lead).to(tl.int64)
        real = (t >= 0) & (t < T)
        ok = real[:, None] & i_ok[None, :]
        k = tl.load(k_base + t[:, None] * k_t, mask=ok, other=0.0).to(tl.float32)
        v = tl.load(v_base + t[:, None] * v_t, mask=ok, other=0.0).to(tl.float32)
        g = tl.load(g_base + t[:, None] * g_t, mask=ok, other=0.0).to(tl.float32)
        if LOGITS:
            g = tl.sigmoid(g)
        g = tl.where(ok, g, 1.0)  # outside, the state stays
        state_k = g * state_k + (1.0 - g) * k
        state_v = g * state_v + (1.0 - g) * v
        out = ((b * T + t) * G + g_head)[:, None] * K + i[None, :]
        tl.store(own_k_ptr + out, state_k.to(own_k_ptr.dtype.element_ty), mask=ok)
        tl.store(own_v_ptr + out, state_v.to(own_v_ptr.dtype.element_ty), mask=ok)
        for r in range(0, H // G):
            h = g_head * (H // G) + r
            q_at = t[:, None] * q_t + (h // Q_GROUP) * q_h
            q = tl.load(q_base + q_at + i[None, :], mask=ok, other=0.0).to(tl.float32)
            turned = q
            inner = q
            if WIDTH > 0:
                other = tl.load(q_base + q_at + partner[None, :], mask=ok & paired[None, :], other=0.0).to(tl.float32)
                turned = q * cos + other * sin
                inner = q * alpha + other * beta
            here = ((t >= 0) & (t < padded))[:, None] & i_ok[None, :]
            spot = ((b * padded + t) * H + h)[:, None] * K + i[None, :]
            tl.store(turned_ptr + spot, turned.to(turned_ptr.dtype.element_ty), mask=here)
            logit = tl.sum(inner * state_k, 1) * scale
            tl.store(logit_ptr + (b * H + h) * T + t, logit, mask=real)
    if END:  # the tile row that holds the last token; later rows have none
        last = (segment == (T - 1 + lead) // C)[:, None] & i_ok[None, :]
        at = (b * G + g_head) * K + i[None, :] + segment[:, None] * 0
        tl.store(end_k_ptr + at, state_k, mask=last)
        tl.store(end_v_ptr + at, state_v, mask=last)


@dataclass(frozen=True)
class Heads:
    """Query heads H and heads of running pairs G; how many of them share one of each input."""

    H: int
    G: int
    Q_GROUP: int
    K_GROUP: int
    V_GROUP: int
    G_GROUP: int


@dataclass(frozen=True)
class Own:
    """What the forward pass leaves: running pairs [B,T,G,K], turned q [B,S·C,H,K], own logits [B,H,T] and, if asked
    for, the last pair [B,G,K] in float32."""

    key: Tensor
    value: Tensor
    turned: Tensor
    logit: Tensor
    end_key: Tensor
    end_value: Tensor


def tile(kernel: str, width: int) -> dict[str, int]:
    """Launch options of a kernel that takes tiles of whole rows."""
    block = max(16, triton.next_power_of_2(width))
    pick = TABLE[kernel]
    return {"ROWS": max(1, pick.rows // block), "K_BLOCK": block, "num_warps": pick.warps}


def own_forward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    heads: Heads,
    tables: tuple[Tensor, Tensor] | None,
    C: int,
    scale: float,
    *,
    logits: bool,
    want_end: bool,
    start: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Own:
    """q, k, v, gate with unit stride in K, tables [N,R] float32 contiguous; start: position [B] and the running pair."""
    q, k, v, _ = inputs
    (B, T, _, K), H, G = q.shape, heads.H, heads.G
    segments = -(-(T if start is None else T + C - 1) // C)
    padded = segments * C if start is None else T
    end = (B, G, K) if want_end else (0,)
    own = Own(
        k.new_empty(B, T, G, K),
        v.new_empty(B, T, G, K),
        q.new_empty(B, padded, H, K),
        q.new_empty(B, H, T, dtype=torch.float32),
        q.new_empty(end, dtype=torch.float32),
        q.new_empty(end, dtype=torch.float32),
    )
    options = tile("own", K)
    _own[(-(-segments // options["ROWS"]) * B * G,)](
        *inputs,
        *(tables or (None, None)),
        *(start or (None, None, None)),
        own.turned,
        own.key,
        own.value,
        own.logit,
        own.end_key if want_end else None,
        own.end_value if want_end else None,
        T,
        padded,
        segments,
        scale,
        *(s for x in inputs for s in x.stride()[:3]),
        **vars(heads),
        **options,
        C=C,
        K=K,
        WIDTH=0 if tables is None else tables[0].shape[1],
        LOGITS=logits,
        START=start is not None,
        END=want_end,
    )
    return own
