"""RAT attention on the GPU: the rotation and the forward attention kernel.

The running means come from the gated scan's kernels. An attention program takes a block of queries of one head:
its softmax starts from the own pairs, one per query, and goes on over blocks of chunk summaries, which are
the running pairs at the last token of each chunk, read in place. The scan is not computed again inside: it
would save one write and one read of the running pairs per token, a few percent of a long forward pass, and
cost registers that the products need.

Bounds per token and head: 2·K·T/C multiply-adds on average, T being the length; q, k̃, ṽ and o are moved once. From
about T/C = 500 on it is bound by the matrix units.

Suffixes: B batch, T time, H query heads, G heads of keys or values, K width, C chunk size, M queries and N
summaries in a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.linear_attention.triton_common import dot_precision

_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Launch:
    """Queries and summaries in a block, warps per program, software pipeline depth."""

    queries: int
    summaries: int
    warps: int
    stages: int


def attend_launch(width: int, itemsize: int, *, backward: bool = False) -> Launch:
    """By width and element size; nothing is tuned at start-up."""
    if itemsize > 2:  # float32: registers and shared memory are short, and speed is not the point
        return Launch(32, 32, 4, 1)
    if width > 128:
        return Launch(64, 32, 8, 1) if backward else Launch(64, 64, 8, 1)
    if backward:
        return Launch(64, 64, 4 if width <= 64 else 8, 2)
    return Launch(128, 64, 4 if width <= 64 else 8, 2)


@triton.jit(do_not_specialize=["T", "rows"])
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    T,
    rows,
    x_b,
    x_t,
    x_h,
    G: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """x [B,T,G,K] turned by the table row [R] of its chunk; TRANSPOSED: the rotation's transpose."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, K_BLOCK)
    t = (row // G) % T
    base = (row // (G * T)) * x_b + t * x_t + (row % G) * x_h
    ok = (row < rows)[:, None] & (i < K)[None, :]
    turned = ok & (i < R)[None, :]
    half: tl.constexpr = R // 2
    low = i < half
    partner = tl.where(low, i + half, i - half)
    x = tl.load(x_ptr + base[:, None] + i[None, :], mask=ok, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + base[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
    table = (t // C)[:, None] * R
    cos = tl.load(cos_ptr + table + i[None, :], mask=turned, other=1.0)
    if TRANSPOSED:
        sin = tl.load(sin_ptr + table + partner[None, :], mask=turned, other=0.0)
        sin = tl.where(low[None, :], sin, -sin)
    else:
        sin = tl.load(sin_ptr + table + i[None, :], mask=turned, other=0.0)
        sin = tl.where(low[None, :], -sin, sin)
    y = x * cos + other * sin
    tl.store(y_ptr + row[:, None] * K + i[None, :], y.to(y_ptr.dtype.element_ty), mask=ok)


def rotate_rows(x: Tensor, cos: Tensor, sin: Tensor, C: int, *, transposed: bool) -> Tensor:
    """x [B,T,G,K] with unit stride in K, tables [N,R] float32 contiguous -> [B,T,G,K] contiguous."""
    B, T, G, K = x.shape
    y = torch.empty(B, T, G, K, dtype=x.dtype, device=x.device)
    k_block = triton.next_power_of_2(K)
    count = max(1, 2048 // k_block)
    _rotate[(-(-B * T * G // count),)](
        x,
        cos,
        sin,
        y,
        T,
        B * T * G,
        *x.stride()[:3],
        G=G,
        K=K,
        R=cos.shape[1],
        C=C,
        ROWS=count,
        K_BLOCK=k_block,
        TRANSPOSED=transposed,
        num_warps=4,
    )
    return y


@triton.jit
def _summaries(ptr, n, n_seen, i, stride_t, C: tl.constexpr, K: tl.constexpr):
    """Rows of the running pairs at the last token of chunks n, zeros from chunk n_seen on: [N, K_BLOCK]."""
    ok = (n < n_seen)[:, None] & (i < K)[None, :]
    t = n.to(tl.int64) * C + (C - 1)
    return tl.load(ptr + t[:, None] * stride_t + i[None, :], mask=ok, other=0.0)


@triton.jit(do_not_specialize=["T"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    T,
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
    H: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """o [B,T,H,K] and the log-sum-exp to base 2 [B,H,T]. `scale` holds log2(e)."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    t = block * M + tl.arange(0, M)
    i = tl.arange(0, K_BLOCK)
    ok = (t < T)[:, None] & (i < K)[None, :]
    row = t.to(tl.int64)[:, None]
    k_base = k_ptr + b * k_b + (h // K_GROUP) * k_h
    v_base = v_ptr + b * v_b + (h // V_GROUP) * v_h
    q = tl.load(q_ptr + b * q_b + h * q_h + row * q_t + i[None, :], mask=ok, other=0.0)
    own_k = tl.load(k_base + row * k_t + i[None, :], mask=ok, other=0.0)
    acc = tl.load(v_base + row * v_t + i[None, :], mask=ok, other=0.0).to(tl.float32)
    top = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1) * scale
    total = tl.full([M], 1.0, tl.float32)

    chunk = t // C
    seen_by_all = (block * M // C) // N * N
    seen = (tl.minimum(block * M + M, T) - 1) // C
    for first in range(0, seen_by_all, N):
        n = first + tl.arange(0, N)
        key = _summaries(k_base, n, seen, i, k_t, C, K)
        s = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        highest = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - highest[:, None])
        shrink = tl.exp2(top - highest)
        value = _summaries(v_base, n, seen, i, v_t, C, K)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = highest
    for first in range(seen_by_all, seen, N):  # where queries of the block differ in what they see
        n = first + tl.arange(0, N)
        key = _summaries(k_base, n, seen, i, k_t, C, K)
        s = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        s = tl.where(n[None, :] < chunk[:, None], s, float("-inf"))
        highest = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - highest[:, None])
        shrink = tl.exp2(top - highest)
        value = _summaries(v_base, n, seen, i, v_t, C, K)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = highest

    o = o_ptr + (b * T + row) * (H * K) + h * K + i[None, :]
    tl.store(o, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=ok)
    tl.store(lse_ptr + bh.to(tl.int64) * T + t, top + tl.log2(total), mask=t < T)


def attend_forward(q: Tensor, k: Tensor, v: Tensor, C: int, scale: float) -> tuple[Tensor, Tensor]:
    """q [B,T,H,K] and running pairs [B,T,G,K], turned already, unit stride in K -> o and the log-sum-exp."""
    B, T, H, K = q.shape
    launch = attend_launch(K, q.element_size())
    o = torch.empty(B, T, H, K, dtype=v.dtype, device=q.device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    _attend[(-(-T // launch.queries), B * H)](
        q,
        k,
        v,
        o,
        lse,
        T,
        scale * _LOG2E,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        H=H,
        K_GROUP=H // k.shape[2],
        V_GROUP=H // v.shape[2],
        C=C,
        K=K,
        M=launch.queries,
        N=launch.summaries,
        K_BLOCK=max(16, triton.next_power_of_2(K)),
        PRECISION=dot_precision(q.dtype),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return o, lse
