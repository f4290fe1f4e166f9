"""Window attention on the GPU: the forward kernel, an online softmax over the band alone.

A program takes M rows (see `triton_band.py`) and walks the sinks before the band, then the band: tiles that every
row sees whole go without a mask. Bounds per query and head: 2·W·(K + V) operations; q and o are moved once, keys and
values once per program that reads them, neighbours finding them in the L2 cache. Narrow windows are bound by memory.

Suffixes as in `triton_band.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels import fitting
from linearize.kernels.window_attention.triton_band import (
    Band,
    capped,
    sequence_start,
    sink_end,
    tile,
    visible,
    whole_keys,
)


@triton.jit
def _absorb(
    acc,
    top,
    total,
    q,
    k_base,
    v_base,
    first,
    limit,
    i,
    start,
    sinks_to,
    window,
    real_ptr,
    S,
    logit_scale,
    cap,
    k_t,
    v_t,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The running softmax with keys first .. first + N, which end before `limit`, taken in."""
    j = first + tl.arange(0, N)
    key = tile(k_base, j, limit, tl.arange(0, K_BLOCK), k_t, K, WHOLE)
    s, _tanh = capped(tl.dot(q, tl.trans(key), input_precision=PRECISION), logit_scale, cap, CAPPED)
    if WHOLE:
        highest = tl.maximum(top, tl.max(s, 1))
        shift = highest
    else:
        seen = visible(i[:, None], j[None, :], start[:, None], sinks_to[:, None], window, real_ptr, S, MASKED, SINKS)
        s = tl.where(seen & (j < limit)[None, :], s, float("-inf"))
        highest = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet
    p = tl.exp2(s - shift[:, None])
    shrink = tl.exp2(top - shift)
    value = tile(v_base, j, limit, tl.arange(0, V_BLOCK), v_t, V, WHOLE)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
    return acc, highest, total


@triton.jit(do_not_specialize=["B", "T", "S", "window", "sinks", "sequence_b"])
def _forward(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    B,
    T,
    S,
    window,
    sinks,
    real_ptr,
    sink_ptr,
    sequence_ptr,
    sequence_b,
    logit_scale,
    cap,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    H: tl.constexpr,
    R: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    SINKS: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """o [B,T,H,V] and the natural log-sum-exp [B,T,H]."""
    blocks = tl.cdiv(T * R, M)
    block = tl.program_id(0) % blocks
    group = tl.program_id(0) // blocks
    b = (group // (H // R)).to(tl.int64)
    head = group % (H // R) * R
    row = block * M + tl.arange(0, M)
    ok = row < T * R
    t = row // R
    i = t + (S - T)
    if PACKED:
        sequence_ptr += b * sequence_b
    first_i = block * M // R + (S - T)
    last_i = tl.minimum((block * M + M - 1) // R, T - 1) + (S - T)
    start = sequence_start(sequence_ptr, i, ok, PACKED)
    first_start = sequence_start(sequence_ptr, first_i, True, PACKED)
    last_start = sequence_start(sequence_ptr, last_i, True, PACKED)
    sinks_to = sink_end(sink_ptr, b, B, start, sinks, MASKED, SINKS)
    if MASKED:
        real_ptr += b * S

    h = head + row % R
    ik = tl.arange(0, K_BLOCK)
    spot = q_ptr + b * q_b + h[:, None] * q_h + t.to(tl.int64)[:, None] * q_t + ik[None, :]
    q = tl.load(spot, mask=ok[:, None] & (ik < K)[None, :], other=0.0)
    k_base = k_ptr + b * k_b + head // K_GROUP * k_h
    v_base = v_ptr + b * v_b + head // V_GROUP * v_h
    acc = tl.zeros([M, V_BLOCK], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)

    low = tl.maximum(first_i - window + 1, first_start)
    if SINKS:
        from_sink = first_start
        if MASKED:
            from_sink = tl.load(sink_ptr + b)
        limit = tl.minimum(sink_end(sink_ptr, b, B, first_start, sinks, MASKED, SINKS), low)
        for first in range(from_sink, limit, N):
            acc, top, total = _absorb(
                acc, top, total, q, k_base, v_base, first, limit, i, start, sinks_to, window, real_ptr, S,
                logit_scale, cap, k_t, v_t, K, V, N, K_BLOCK, V_BLOCK, CAPPED, MASKED, SINKS, False, PRECISION,
            )  # fmt: skip
    limit = last_i + 1
    whole_from, whole_to = whole_keys(low, first_i, last_i, last_start, window, N, MASKED)
    for first in range(low, whole_from, N):
        acc, top, total = _absorb(
            acc, top, total, q, k_base, v_base, first, limit, i, start, sinks_to, window, real_ptr, S,
            logit_scale, cap, k_t, v_t, K, V, N, K_BLOCK, V_BLOCK, CAPPED, MASKED, SINKS, False, PRECISION,
        )  # fmt: skip
    for first in range(whole_from, whole_to, N):
        acc, top, total = _absorb(
            acc, top, total, q, k_base, v_base, first, limit, i, start, sinks_to, window, real_ptr, S,
            logit_scale, cap, k_t, v_t, K, V, N, K_BLOCK, V_BLOCK, CAPPED, MASKED, SINKS, True, PRECISION,
        )  # fmt: skip
    for first in range(whole_to, limit, N):
        acc, top, total = _absorb(
            acc, top, total, q, k_base, v_base, first, limit, i, start, sinks_to, window, real_ptr, S,
            logit_scale, cap, k_t, v_t, K, V, N, K_BLOCK, V_BLOCK, CAPPED, MASKED, SINKS, False, PRECISION,
        )  # fmt: skip

    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    lse = tl.where(some, (top + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
    place = (b * T + t) * H + h
    iv = tl.arange(0, V_BLOCK)
    o = (acc / divisor[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + place[:, None] * V + iv[None, :], o, mask=ok[:, None] & (iv < V)[None, :])
    tl.store(lse_ptr + place, lse, mask=ok)


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
    """q [B,T,H,K], k [B,S,Hk,K], v [B,S,Hv,V], unit stride in the last -> o and the log-sum-exp."""
    B, T, H, _ = q.shape
    o = torch.empty(B, T, H, v.shape[3], dtype=v.dtype, device=v.device)
    lse = torch.empty(B, T, H, dtype=torch.float32, device=v.device)
    options = band.options(q, k, v, "forward")
    programs = B * (H // options["R"]) * triton.cdiv(T * options["R"], options["M"])
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    fitting.launch(_forward, (programs,), q, k, v, o, lse, *band.arguments(q, k, scale), *strides, **options)
    return o, lse
