"""Attention over chunk summaries on the GPU, starting from the own pairs; the backward kernels.

A program takes a block of queries of one head: its softmax starts from the own pairs, one per query, and goes on over
blocks of the summaries of earlier chunks. The backward pass computes the probabilities again from the saved
log-sum-exp: one kernel takes blocks of queries, a second blocks of summaries. Nothing is added atomically, so
gradients repeat bit for bit.

Bounds per token and head: T/C / 2 summaries on average, T being the length; 4·K operations for each in the forward
pass and 14·K in the backward, where scores are computed twice. In 16 bits 8·K bytes are moved forward, 8·K backward.
From about T/C = 500 on the matrix units are the limit.

Suffixes: B batch, T time, H query heads, G heads of running pairs (H = G·R), K width, C chunk size, S chunks,
M queries and N summaries in a block.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels import fitting
from linearize.kernels.linear_attention.triton_common import dot_precision
from linearize.kernels.rat_attention.launch import launch, width_block

_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453


@triton.jit(do_not_specialize=["T", "padded"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    own_v_ptr,
    logit_ptr,
    position_ptr,
    o_ptr,
    lse_ptr,
    T,
    padded,
    scale,
    log2e,
    ln2,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    START: tl.constexpr,
):
    """o [B,T,H,K] and the log-sum-exp [B,H,T] of turned q [B,padded,H,K]; k, v summaries, own values [B,T,G,K] and
    own logits [B,H,T]. START: row b's first token is number position[b]."""
    blocks = tl.cdiv(T, M)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest first
    bh = tl.program_id(0) // blocks
    b = (bh // H).to(tl.int64)
    h = bh % H
    g = h // (H // G)
    t = block * M + tl.arange(0, M)
    i = tl.arange(0, K_BLOCK)
    ok = (t < T)[:, None] & (i < K)[None, :]
    row = t.to(tl.int64)[:, None]
    begin = 0
    if START:
        begin = tl.load(position_ptr + b).to(tl.int32)
    k_base = k_ptr + b * k_b + g * k_h + i[None, :]
    v_base = v_ptr + b * v_b + g * v_h + i[None, :]
    q = tl.load(q_ptr + ((b * padded + row) * H + h) * K + i[None, :], mask=ok, other=0.0)
    acc = tl.load(own_v_ptr + ((b * T + row) * G + g) * K + i[None, :], mask=ok, other=0.0).to(tl.float32)
    top = tl.load(logit_ptr + bh.to(tl.int64) * T + t, mask=t < T, other=0.0) * log2e
    total = tl.full([M], 1.0, tl.float32)

    chunk = (t + begin) // C
    seen = (tl.minimum(block * M + M, T) - 1 + begin) // C
    seen_by_all = ((block * M + begin) // C) // N * N
    for first in range(0, seen_by_all, N):
        n = (first + tl.arange(0, N)).to(tl.int64)[:, None]
        key = tl.load(k_base + n * k_n, mask=(i < K)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(key), input_precision=PRECISION) * (scale * log2e)
        highest = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - highest[:, None])
        shrink = tl.exp2(top - highest)
        value = tl.load(v_base + n * v_n, mask=(i < K)[None, :], other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = highest
    for first in range(seen_by_all, seen, N):  # where queries of the block differ in what they see
        n = first + tl.arange(0, N)
        here = (n < seen)[:, None] & (i < K)[None, :]
        key = tl.load(k_base + n.to(tl.int64)[:, None] * k_n, mask=here, other=0.0)
        s = tl.dot(q, tl.trans(key), input_precision=PRECISION) * (scale * log2e)
        s = tl.where(n[None, :] < chunk[:, None], s, float("-inf"))
        highest = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - highest[:, None])
        shrink = tl.exp2(top - highest)
        value = tl.load(v_base + n.to(tl.int64)[:, None] * v_n, mask=here, other=0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = highest

    o = o_ptr + ((b * T + row) * H + h) * K + i[None, :]
    tl.store(o, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=ok)
    tl.store(lse_ptr + bh.to(tl.int64) * T + t, (top + tl.log2(total)) * ln2, mask=t < T)


@triton.jit(do_not_specialize=["T", "padded", "summaries"])
def _queries(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    T,
    padded,
    summaries,
    scale,
    log2e,
    do_b,
    do_t,
    do_h,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq [B,padded,H,K] of the turned q, from the summaries [B,S−1,G,K] alone, and delta = Σ do·o [B,H,T]."""
    blocks = tl.cdiv(T, M)
    block = blocks - 1 - tl.program_id(0) % blocks
    bh = tl.program_id(0) // blocks
    b = (bh // H).to(tl.int64)
    h = bh % H
    g = h // (H // G)
    t = block * M + tl.arange(0, M)
    i = tl.arange(0, K_BLOCK)
    ok = (t < T)[:, None] & (i < K)[None, :]
    row = t.to(tl.int64)[:, None]
    at = ((b * padded + row) * H + h) * K + i[None, :]
    q = tl.load(q_ptr + at, mask=ok, other=0.0)
    do = tl.load(do_ptr + b * do_b + h * do_h + row * do_t + i[None, :], mask=ok, other=0.0)
    o = tl.load(o_ptr + ((b * T + row) * H + h) * K + i[None, :], mask=ok, other=0.0)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * T + t, mask=t < T, other=0.0) * log2e
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta_ptr + bh.to(tl.int64) * T + t, delta, mask=t < T)
    dq = tl.zeros([M, K_BLOCK], tl.float32)
    chunk = t // C
    seen = (tl.minimum(block * M + M, T) - 1) // C
    for first in range(0, seen, N):
        n = first + tl.arange(0, N)
        here = (n < seen)[:, None] & (i < K)[None, :]
        slot = ((b * summaries + n.to(tl.int64)) * G + g)[:, None] * K + i[None, :]
        key = tl.load(k_ptr + slot, mask=here, other=0.0)
        value = tl.load(v_ptr + slot, mask=here, other=0.0)
        s = tl.dot(q, tl.trans(key), input_precision=PRECISION) * (scale * log2e)
        p = tl.where(n[None, :] < chunk[:, None], tl.exp2(s - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision=PRECISION)
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["T", "padded", "summaries"])
def _chunks(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    T,
    padded,
    summaries,
    scale,
    log2e,
    do_b,
    do_t,
    do_h,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients [B,S−1,H,K] of a block of summaries, per query head."""
    blocks = tl.cdiv(summaries, N)
    first = tl.program_id(0) % blocks * N
    bh = tl.program_id(0) // blocks
    b = (bh // H).to(tl.int64)
    h = bh % H
    n = first + tl.arange(0, N)
    i = tl.arange(0, K_BLOCK)
    here = (n < summaries)[:, None] & (i < K)[None, :]
    slot = (b * summaries + n.to(tl.int64))[:, None]
    at = (slot * G + h // (H // G)) * K + i[None, :]
    key = tl.load(k_ptr + at, mask=here, other=0.0)
    value = tl.load(v_ptr + at, mask=here, other=0.0)
    q_base = q_ptr + (b * padded * H + h) * K + i[None, :]
    do_base = do_ptr + b * do_b + h * do_h + i[None, :]
    dk = tl.zeros([N, K_BLOCK], tl.float32)
    dv = tl.zeros([N, K_BLOCK], tl.float32)
    for start in range((first + 1) * C // M * M, T, M):
        t = start + tl.arange(0, M)
        ok = (t < T)[:, None] & (i < K)[None, :]
        row = t.to(tl.int64)[:, None]
        q = tl.load(q_base + row * (H * K), mask=ok, other=0.0)
        do = tl.load(do_base + row * do_t, mask=ok, other=0.0)
        lse = tl.load(lse_ptr + bh.to(tl.int64) * T + t, mask=t < T, other=0.0) * log2e
        delta = tl.load(delta_ptr + bh.to(tl.int64) * T + t, mask=t < T, other=0.0)
        s = tl.dot(key, tl.trans(q), input_precision=PRECISION) * (scale * log2e)
        visible = (n[:, None] < (t // C)[None, :]) & (t < T)[None, :]
        p = tl.where(visible, tl.exp2(s - lse[None, :]), 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(value, tl.trans(do), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    out = (slot * H + h) * K + i[None, :]
    tl.store(dk_ptr + out, dk * scale, mask=here)
    tl.store(dv_ptr + out, dv, mask=here)


def _options(kernel: str, q: Tensor, G: int, C: int) -> dict[str, Any]:
    K, size = q.shape[3], q.element_size()
    pick = launch(kernel, K, size, fitting.little_shared_memory())
    return {
        "H": q.shape[2],
        "G": G,
        "C": C,
        "K": K,
        "M": pick.rows,
        "N": pick.columns,
        "K_BLOCK": width_block(K, size),
        "PRECISION": dot_precision(q.dtype),
        "num_warps": pick.warps,
        "num_stages": pick.stages,
    }


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    own_value: Tensor,
    logit: Tensor,
    C: int,
    scale: float,
    position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Turned q [B,>=T,H,K], summaries [B,S,G,K] of any strides, own values [B,T,G,K], own logits [B,H,T] -> o, log-sum-exp.

    position [B]: which token of its row the first is; default 0.
    """
    B, T, G, K = own_value.shape
    H = q.shape[2]
    o, lse = own_value.new_empty(B, T, H, K), logit.new_empty(B, H, T)
    options = _options("attend", q, G, C)
    fitting.launch(
        _attend,
        (-(-T // options["M"]) * B * H,),
        q, keys, values, own_value, logit, position, o, lse, T, q.shape[1], scale, _LOG2E, _LN2,
        *keys.stride()[:3], *values.stride()[:3], START=position is not None, **options,
    )  # fmt: skip
    return o, lse


def attend_backward(
    q: Tensor, keys: Tensor, values: Tensor, o: Tensor, lse: Tensor, do: Tensor, C: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the turned q, as [B, C·H, S−1, K] from the second chunk on, and of the summaries, [B,S−1,H,K] float32."""
    B, T, H, K = o.shape
    padded, (summaries, G) = q.shape[1], keys.shape[1:3]
    dq, delta = q.new_empty(q.shape), lse.new_empty(lse.shape)
    dk, dv = (lse.new_empty(B, summaries, H, K) for _ in range(2))
    if summaries > 0:
        shared = (T, padded, summaries, scale, _LOG2E, *do.stride()[:3])
        options = _options("queries", q, G, C)
        fitting.launch(
            _queries, (-(-T // options["M"]) * B * H,), q, keys, values, o, do, lse, delta, dq, *shared, **options
        )
        options = _options("chunks", q, G, C)
        grid = (-(-summaries // options["N"]) * B * H,)
        fitting.launch(_chunks, grid, q, keys, values, do, lse, delta, dk, dv, *shared, **options)
    return dq.view(B, -1, C * H, K)[:, 1:].transpose(1, 2), dk, dv
