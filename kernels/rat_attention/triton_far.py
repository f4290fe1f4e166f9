"""Attention of RAT with a window over the chunk summaries on the GPU: it joins what attention over the window found.

A program takes a block of queries of one head: its softmax starts from the window's output and log-sum-exp and goes on
over the summaries that its queries see. Which those are is read from two ranges per query (see `window_places.py`).
The backward pass computes the probabilities from the log-sum-exp of the whole softmax: one kernel takes blocks of
queries and adds to the window's dq, a second blocks of summaries. Nothing is added atomically.

Bounds per token and head: T/C / 2 summaries on average, T being the length; 4·K operations for each in the forward
pass and 14·K in the backward. In 16 bits 6·K bytes are moved forward, 12·K backward.

Suffixes: B batch, T queries, N summaries, H query heads, G kv heads (H = G·R), K width; M queries and N summaries in a
block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels import fitting
from linearize.kernels.gated_scan.triton_scan import sum_groups
from linearize.kernels.linear_attention.triton_common import dot_precision
from linearize.kernels.rat_attention.launch import launch, width_block
from linearize.kernels.rat_attention.window_places import Places
from linearize.kernels.window_attention.triton_band import LOG2E, capped

_UNSPECIALIZED = ["T", "summaries", "places_b"]


@triton.jit
def _seen(n, low, high):
    return (n[None, :] >= low[:, None]) & (n[None, :] < high[:, None])


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _forward(
    q_ptr,
    k_ptr,
    v_ptr,
    offset_ptr,
    low_ptr,
    high_ptr,
    o_ptr,
    lse_ptr,
    T,
    summaries,
    places_b,
    logit_scale,
    cap,
    q_b,
    q_t,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The window's o [B,T,H,K] and log-sum-exp [B,T,H] become those of the whole softmax, in place."""
    blocks = tl.cdiv(T, M)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest first
    bh = tl.program_id(0) // blocks
    b = (bh // H).to(tl.int64)
    h = bh % H
    t = block * M + tl.arange(0, M)
    wide_t = t.to(tl.int64)
    i = tl.arange(0, K_BLOCK)
    ok = (t < T)[:, None] & (i < K)[None, :]
    low_ptr += b * places_b
    high_ptr += b * places_b
    last = tl.minimum(block * M + M, T) - 1
    low = tl.load(low_ptr + t, mask=t < T, other=0)
    high = tl.load(high_ptr + t, mask=t < T, other=0)
    begin = tl.load(low_ptr + block * M)
    whole_from = tl.load(low_ptr + last)
    whole_to = tl.load(high_ptr + block * M)
    end = tl.minimum(tl.load(high_ptr + last), summaries)

    k_base = k_ptr + b * k_b + (h // R) * k_h + i[None, :]
    v_base = v_ptr + b * v_b + (h // R) * v_h + i[None, :]
    q = tl.load(q_ptr + b * q_b + h * q_h + wide_t[:, None] * q_t + i[None, :], mask=ok, other=0.0)
    place = (b * T + wide_t) * H + h
    acc = tl.load(o_ptr + place[:, None] * K + i[None, :], mask=ok, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + place, mask=t < T, other=0.0)
    some = lse > float("-inf")  # padding sees nothing at all
    top = tl.where(some, lse * 1.4426950408889634, 0.0)
    total = tl.full([M], 1.0, tl.float32)
    offset = tl.load(offset_ptr + h) * 1.4426950408889634
    if whole_from > begin:
        whole_to = begin
    whole_to = begin + tl.maximum(whole_to - begin, 0) // N * N
    for first in range(begin, whole_to, N):
        n = (first + tl.arange(0, N)).to(tl.int64)[:, None]
        key = tl.load(k_base + n * k_n, mask=(i < K)[None, :], other=0.0)
        s, _tanh = capped(tl.dot(q, tl.trans(key), input_precision=PRECISION), logit_scale, cap, CAPPED)
        s += offset
        highest = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - highest[:, None])
        shrink = tl.exp2(top - highest)
        value = tl.load(v_base + n * v_n, mask=(i < K)[None, :], other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = highest
    for first in range(whole_to, end, N):  # where queries of the block differ in what they see
        n = first + tl.arange(0, N)
        here = (n < end)[:, None] & (i < K)[None, :]
        key = tl.load(k_base + n.to(tl.int64)[:, None] * k_n, mask=here, other=0.0)
        s, _tanh = capped(tl.dot(q, tl.trans(key), input_precision=PRECISION), logit_scale, cap, CAPPED)
        s = tl.where(_seen(n, low, high), s + offset, float("-inf"))
        highest = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - highest[:, None])
        shrink = tl.exp2(top - highest)
        value = tl.load(v_base + n.to(tl.int64)[:, None] * v_n, mask=here, other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = highest

    o = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + place[:, None] * K + i[None, :], o, mask=ok)
    lse = tl.where(some, (top + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + place, lse, mask=t < T)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _queries(
    q_ptr,
    k_ptr,
    v_ptr,
    offset_ptr,
    low_ptr,
    high_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    d_offset_ptr,
    T,
    summaries,
    places_b,
    scale,
    logit_scale,
    cap,
    q_b,
    q_t,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    do_b,
    do_t,
    do_h,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Added to dq [B,T,H,K]; what each query gives to its head's offset [B,T,H]."""
    blocks = tl.cdiv(T, M)
    block = blocks - 1 - tl.program_id(0) % blocks
    bh = tl.program_id(0) // blocks
    b = (bh // H).to(tl.int64)
    h = bh % H
    t = block * M + tl.arange(0, M)
    wide_t = t.to(tl.int64)
    i = tl.arange(0, K_BLOCK)
    ok = (t < T)[:, None] & (i < K)[None, :]
    low_ptr += b * places_b
    high_ptr += b * places_b
    last = tl.minimum(block * M + M, T) - 1
    low = tl.load(low_ptr + t, mask=t < T, other=0)
    high = tl.load(high_ptr + t, mask=t < T, other=0)
    begin = tl.load(low_ptr + block * M)
    end = tl.minimum(tl.load(high_ptr + last), summaries)

    k_base = k_ptr + b * k_b + (h // R) * k_h + i[None, :]
    v_base = v_ptr + b * v_b + (h // R) * v_h + i[None, :]
    q = tl.load(q_ptr + b * q_b + h * q_h + wide_t[:, None] * q_t + i[None, :], mask=ok, other=0.0)
    do = tl.load(do_ptr + b * do_b + h * do_h + wide_t[:, None] * do_t + i[None, :], mask=ok, other=0.0)
    place = (b * T + wide_t) * H + h
    lse = tl.load(lse_ptr + place, mask=t < T, other=0.0) * 1.4426950408889634
    delta = tl.load(delta_ptr + place, mask=t < T, other=0.0)
    offset = tl.load(offset_ptr + h) * 1.4426950408889634
    dq = tl.zeros([M, K_BLOCK], tl.float32)
    d_offset = tl.zeros([M], tl.float32)
    for first in range(begin, end, N):
        n = first + tl.arange(0, N)
        here = (n < end)[:, None] & (i < K)[None, :]
        key = tl.load(k_base + n.to(tl.int64)[:, None] * k_n, mask=here, other=0.0)
        value = tl.load(v_base + n.to(tl.int64)[:, None] * v_n, mask=here, other=0.0)
        s, tanh = capped(tl.dot(q, tl.trans(key), input_precision=PRECISION), logit_scale, cap, CAPPED)
        p = tl.where(_seen(n, low, high), tl.exp2(s + offset - lse[:, None]), 0.0)
        ds = p * (tl.dot(do, tl.trans(value), input_precision=PRECISION) - delta[:, None])
        d_offset += tl.sum(ds, 1)
        if CAPPED:
            ds *= 1.0 - tanh * tanh
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision=PRECISION)
    spot = dq_ptr + place[:, None] * K + i[None, :]
    dq = dq * scale + tl.load(spot, mask=ok, other=0.0).to(tl.float32)
    tl.store(spot, dq.to(dq_ptr.dtype.element_ty), mask=ok)
    tl.store(d_offset_ptr + place, d_offset, mask=t < T)


@triton.jit(do_not_specialize=[*_UNSPECIALIZED, "range_b"])
def _summaries(
    q_ptr,
    k_ptr,
    v_ptr,
    offset_ptr,
    low_ptr,
    high_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    range_ptr,
    range_b,
    T,
    summaries,
    places_b,
    scale,
    logit_scale,
    cap,
    q_b,
    q_t,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    do_b,
    do_t,
    do_h,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients [B,N,H,K] of a block of summaries, per query head; its queries are those of range [B or 1, 2, blocks]."""
    blocks = tl.cdiv(summaries, N)
    block = tl.program_id(0) % blocks
    bh = tl.program_id(0) // blocks
    b = (bh // H).to(tl.int64)
    h = bh % H
    n = block * N + tl.arange(0, N)
    i = tl.arange(0, K_BLOCK)
    here = (n < summaries)[:, None] & (i < K)[None, :]
    low_ptr += b * places_b
    high_ptr += b * places_b
    wide_n = n.to(tl.int64)[:, None]
    key = tl.load(k_ptr + b * k_b + (h // R) * k_h + wide_n * k_n + i[None, :], mask=here, other=0.0)
    value = tl.load(v_ptr + b * v_b + (h // R) * v_h + wide_n * v_n + i[None, :], mask=here, other=0.0)
    offset = tl.load(offset_ptr + h) * 1.4426950408889634
    q_base = q_ptr + b * q_b + h * q_h + i[None, :]
    do_base = do_ptr + b * do_b + h * do_h + i[None, :]
    dk = tl.zeros([N, K_BLOCK], tl.float32)
    dv = tl.zeros([N, K_BLOCK], tl.float32)
    begin = tl.load(range_ptr + b * range_b + block) // M * M
    end = tl.load(range_ptr + b * range_b + blocks + block)
    for start in range(begin, end, M):
        t = start + tl.arange(0, M)
        wide_t = t.to(tl.int64)
        ok = (t < T)[:, None] & (i < K)[None, :]
        q = tl.load(q_base + wide_t[:, None] * q_t, mask=ok, other=0.0)
        do = tl.load(do_base + wide_t[:, None] * do_t, mask=ok, other=0.0)
        place = (b * T + wide_t) * H + h
        lse = tl.load(lse_ptr + place, mask=t < T, other=0.0) * 1.4426950408889634
        delta = tl.load(delta_ptr + place, mask=t < T, other=0.0)
        low = tl.load(low_ptr + t, mask=t < T, other=0)
        high = tl.load(high_ptr + t, mask=t < T, other=0)
        s, tanh = capped(tl.dot(key, tl.trans(q), input_precision=PRECISION), logit_scale, cap, CAPPED)
        seen = (n[:, None] >= low[None, :]) & (n[:, None] < high[None, :])
        p = tl.where(seen, tl.exp2(s + offset - lse[None, :]), 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        ds = p * (tl.dot(value, tl.trans(do), input_precision=PRECISION) - delta[None, :])
        if CAPPED:
            ds *= 1.0 - tanh * tanh
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    out = ((b * summaries + wide_n) * H + h) * K + i[None, :]
    tl.store(dk_ptr + out, dk * scale, mask=here)
    tl.store(dv_ptr + out, dv, mask=here)


def _options(kernel: str, q: Tensor, keys: Tensor, softcap: float | None) -> dict[str, Any]:
    (H, K), size = q.shape[2:], q.element_size()
    pick = launch(kernel, K, size, fitting.little_shared_memory())
    return {
        "H": H,
        "R": H // keys.shape[2],
        "K": K,
        "M": pick.rows,
        "N": pick.columns,
        "K_BLOCK": width_block(K, size),
        "CAPPED": softcap is not None,
        "PRECISION": dot_precision(q.dtype),
        "num_warps": pick.warps,
        "num_stages": pick.stages,
    }


def _scales(scale: float, softcap: float | None) -> tuple[float, float]:
    return (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)


def _row_stride(x: Tensor) -> int:
    return 0 if len(x) == 1 else x.stride(0)


def join(
    q: Tensor,
    summaries: tuple[Tensor, Tensor],
    offset: Tensor,
    near: tuple[Tensor, Tensor],
    seen: Places,
    scale: float,
    softcap: float | None,
) -> None:
    """Take the summaries [B,N,G,K] into the window's o [B,T,H,K] and log-sum-exp [B,T,H], contiguous, in place.

    q and the summaries have unit stride in K; offset [H] is float32.
    """
    (B, T, H, _), (keys, values) = q.shape, summaries
    options = _options("attend", q, keys, softcap)
    fitting.launch(
        _forward,
        (triton.cdiv(T, options["M"]) * B * H,),
        q, keys, values, offset, seen.low, seen.high, *near, T, keys.shape[1], _row_stride(seen.low),
        *_scales(scale, softcap), *q.stride()[:3], *keys.stride()[:3], *values.stride()[:3], **options,
    )  # fmt: skip


def join_backward(
    q: Tensor,
    summaries: tuple[Tensor, Tensor],
    offset: Tensor,
    whole: tuple[Tensor, Tensor, Tensor],
    dq: Tensor,
    seen: Places,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the summaries and the offset; what q gets is added to dq [B,T,H,K] in place.

    whole: do, and of the whole softmax the log-sum-exp and delta = Σ do·o [B,T,H].
    """
    (B, T, H, K), (keys, values) = q.shape, summaries
    do, lse, delta = whole
    N = keys.shape[1]
    shared = (T, N, _row_stride(seen.low), scale, *_scales(scale, softcap), *q.stride()[:3])
    shared += (*keys.stride()[:3], *values.stride()[:3], *do.stride()[:3])
    tensors = (q, keys, values, offset, seen.low, seen.high, do, lse, delta)
    d_offset = torch.empty_like(lse)
    options = _options("queries", q, keys, softcap)
    fitting.launch(_queries, (triton.cdiv(T, options["M"]) * B * H,), *tensors, dq, d_offset, *shared, **options)
    dk, dv = (lse.new_empty(B, N, H, K) for _ in range(2))
    if N > 0:
        options = _options("chunks", q, keys, softcap)
        # Ranges never go back, so the queries of a block of summaries are found by bisection.
        first = torch.arange(0, N, options["N"], dtype=torch.int32, device=q.device).expand(len(seen.low), -1)
        begin = torch.searchsorted(seen.high, first.contiguous(), right=True, out_int32=True)
        end = torch.searchsorted(seen.low, first + (options["N"] - 1), right=True, out_int32=True)
        ranges = torch.stack([begin, end], 1)
        grid = (triton.cdiv(N, options["N"]) * B * H,)
        fitting.launch(_summaries, grid, *tensors, dk, dv, ranges, _row_stride(ranges), *shared, **options)
    dk, dv = (sum_groups(d, keys.shape[2]).to(keys.dtype) for d in (dk, dv))
    return dk, dv, d_offset.sum((0, 1))
