"""Chunk summaries on the GPU: the running pair at the last token of each chunk, its key turned, laid out for attention.

`gather` writes each summary once (or once per query head and place in a chunk, which is how torch's attention takes
it); `gather_back` sums what the copies get and turns the key back. Bound: what is read and written, 1/C of the tokens
each way, times the copies.

Suffixes as in `triton_own.py`; J copies of a summary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.rat_attention.launch import TABLE
from linearize.kernels.rat_attention.triton_own import partners


@triton.jit(do_not_specialize=["first", "count", "T"])
def _gather(
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    count,
    T,
    y_b,
    y_n,
    y_j,
    G: tl.constexpr,
    REPEAT: tl.constexpr,
    COPIES: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    START: tl.constexpr,
):
    """y[b, n, c·G·REPEAT + g·REPEAT + r] = x[b, last token of chunk n, g], for x [B,T,G,K] contiguous.

    START: only chunks that tokens position[b] … position[b] + T − 1 finish, x holding those tokens.
    """
    tiles = tl.cdiv(count, ROWS)
    g = (tl.program_id(0) % G).to(tl.int64)
    n = (tl.program_id(0) // G % tiles) * ROWS + tl.arange(0, ROWS)
    b = (tl.program_id(0) // G // tiles).to(tl.int64)
    i = tl.arange(0, K_BLOCK)
    half: tl.constexpr = WIDTH // 2
    partner = partners(i, half)
    ok_n = n < count
    t = n.to(tl.int64) * C + (C - 1)
    chunk = n.to(tl.int64)
    if START:
        position = tl.load(position_ptr + b)
        chunk += position // C
        t -= position % C
        ok_n = t < T
    ok = ok_n[:, None] & (i < K)[None, :]
    x_base = x_ptr + ((b * T + t) * G + g)[:, None] * K
    x = tl.load(x_base + i[None, :], mask=ok, other=0.0)
    if WIDTH > 0:
        turned = ok & (i < WIDTH)[None, :]
        table = chunk[:, None] * WIDTH + i[None, :]
        cos = tl.load(cos_ptr + table, mask=turned, other=1.0)
        sin = tl.load(sin_ptr + table, mask=turned, other=0.0)
        other = tl.load(x_base + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        x = x.to(tl.float32) * cos + other * tl.where(i < half, -1.0, 1.0)[None, :] * sin
    y_base = y_ptr + b * y_b + chunk[:, None] * y_n + i[None, :]
    for c in range(0, COPIES):
        for r in range(0, REPEAT):
            tl.store(y_base + ((c * G + g) * REPEAT + r) * y_j, x.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["count"])
def _gather_back(
    dy_ptr,
    dx_ptr,
    cos_ptr,
    sin_ptr,
    count,
    dy_b,
    dy_n,
    dy_j,
    G: tl.constexpr,
    REPEAT: tl.constexpr,
    COPIES: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """dx [B,count,G,K] float32: the sum over copies of dy, turned back."""
    tiles = tl.cdiv(count, ROWS)
    g = (tl.program_id(0) % G).to(tl.int64)
    n = (tl.program_id(0) // G % tiles) * ROWS + tl.arange(0, ROWS)
    b = (tl.program_id(0) // G // tiles).to(tl.int64)
    i = tl.arange(0, K_BLOCK)
    half: tl.constexpr = WIDTH // 2
    partner = partners(i, half)
    ok = (n < count)[:, None] & (i < K)[None, :]
    turned = ok & (i < WIDTH)[None, :]
    dy_base = dy_ptr + b * dy_b + n.to(tl.int64)[:, None] * dy_n
    dx = tl.zeros([ROWS, K_BLOCK], tl.float32)
    other = tl.zeros([ROWS, K_BLOCK], tl.float32)
    for c in range(0, COPIES):
        for r in range(0, REPEAT):
            at = dy_base + ((c * G + g) * REPEAT + r) * dy_j
            dx += tl.load(at + i[None, :], mask=ok, other=0.0).to(tl.float32)
            if WIDTH > 0:
                other += tl.load(at + partner[None, :], mask=turned, other=0.0).to(tl.float32)
    if WIDTH > 0:
        table = n.to(tl.int64)[:, None] * WIDTH
        cos = tl.load(cos_ptr + table + i[None, :], mask=turned, other=1.0)
        sin = tl.load(sin_ptr + table + partner[None, :], mask=turned, other=0.0)
        dx = dx * cos + other * tl.where(i < half, 1.0, -1.0)[None, :] * sin
    out = ((b * count + n) * G + g)[:, None] * K + i[None, :]
    tl.store(dx_ptr + out, dx, mask=ok)


def _shape(x: Tensor, tables: tuple[Tensor, Tensor] | None) -> dict[str, int]:
    K = x.shape[-1]
    block = max(16, triton.next_power_of_2(K))
    pick = TABLE["move"]
    width = 0 if tables is None else tables[0].shape[1]
    return {
        "K": K,
        "WIDTH": width,
        "ROWS": max(1, pick.rows // block),
        "K_BLOCK": block,
        "num_warps": pick.warps,
    }


def gather(
    x: Tensor, tables: tuple[Tensor, Tensor] | None, C: int, count: int, *, repeat: int = 1, copies: int = 1
) -> Tensor:
    """Running pairs x [B,T,G,K], contiguous -> the first `count` chunks' summaries [B, count, copies·G·repeat, K]."""
    B, T, G, _ = x.shape
    y = x.new_empty(B, count, copies * G * repeat, x.shape[3])
    options = _shape(x, tables)
    if count > 0:
        _gather[(-(-count // options["ROWS"]) * B * G,)](
            x, y, *(tables or (None, None)), None, count, T, *y.stride()[:3],
            G=G, REPEAT=repeat, COPIES=copies, C=C, START=False, **options,
        )  # fmt: skip
    return y


def gather_into(slots: Tensor, x: Tensor, tables: tuple[Tensor, Tensor] | None, C: int, position: Tensor) -> None:
    """Put the chunks that x [B,T,G,K], contiguous, finishes into slots [B,G,S,K]; row b starts at position[b]."""
    B, T, G, _ = x.shape
    options = _shape(x, tables)
    count = -(-(T + C - 1) // C)
    _gather[(-(-count // options["ROWS"]) * B * G,)](
        x, slots, *(tables or (None, None)), position, count, T, slots.stride(0), slots.stride(2), slots.stride(1),
        G=G, REPEAT=1, COPIES=1, C=C, START=True, **options,
    )  # fmt: skip


def gather_back(
    dy: Tensor, heads: int, tables: tuple[Tensor, Tensor] | None, *, repeat: int = 1, copies: int = 1
) -> Tensor:
    """Gradients dy [B, count, copies·heads·repeat, K], unit stride in K -> [B, count, heads, K] float32."""
    B, count, _, K = dy.shape
    dx = dy.new_empty(B, count, heads, K, dtype=torch.float32)
    options = _shape(dy, tables)
    if count > 0:
        _gather_back[(-(-count // options["ROWS"]) * B * heads,)](
            dy, dx, *(tables or (None, None)), count, *dy.stride()[:3],
            G=heads, REPEAT=repeat, COPIES=copies, **options,
        )  # fmt: skip
    return dx
