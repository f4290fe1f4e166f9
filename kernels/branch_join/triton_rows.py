"""The join on the GPU: one kernel each way, which moves every tensor once.

A program takes tiles of tokens of one head. The gradients of scale and window_part stay in registers over a program's
tiles; they are summed over its rows once, and then over programs, in a fixed order. Bounds, in 16 bits: 6 bytes per
element forward (y, window, output), 10 backward (those three, both gradients).

With u = scale ⊙ y − part ⊙ window and γ = σ(logit): do·γ·scale is y's gradient, do (1 − γ part) the window's,
γ (1 − γ) Σ do·u the logit's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.rows import Tiles, tiles
from linearize.kernels.triton_math import sigmoid


@triton.jit
def _read(y_ptr, window_ptr, logit_ptr, row, h, d, in_rows, ok, y_r, y_h, w_r, w_h, H: tl.constexpr):
    """y and window [ROWS,BLOCK], σ(logit) and σ(-logit) [ROWS,1]; float32."""
    row = row.to(tl.int64)
    y = tl.load(y_ptr + row[:, None] * y_r + h * y_h + d[None, :], mask=ok, other=0.0).to(tl.float32)
    w = tl.load(window_ptr + row[:, None] * w_r + h * w_h + d[None, :], mask=ok, other=0.0).to(tl.float32)
    share, rest = sigmoid(tl.load(logit_ptr + row * H + h, mask=in_rows, other=0.0))
    return y, w, share[:, None], rest[:, None]


@triton.jit(do_not_specialize=["R"])
def _forward(
    y_ptr,
    window_ptr,
    logit_ptr,
    scale_ptr,
    part_ptr,
    o_ptr,
    R,
    y_r,
    y_h,
    w_r,
    w_h,
    H: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr + h * V + d, mask=d < V, other=0.0)[None, :]
    part = tl.load(part_ptr + h * V + d, mask=d < V, other=0.0)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = (row < R)[:, None] & (d < V)[None, :]
    y, w, share, _rest = _read(y_ptr, window_ptr, logit_ptr, row, h, d, row < R, ok, y_r, y_h, w_r, w_h, H)
    o = w + share * (scale * y - part * w)
    tl.store(o_ptr + (row.to(tl.int64)[:, None] * H + h) * V + d[None, :], o.to(o_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["R", "count"])
def _backward(
    y_ptr,
    window_ptr,
    logit_ptr,
    scale_ptr,
    part_ptr,
    do_ptr,
    dy_ptr,
    dwindow_ptr,
    dlogit_ptr,
    sums_ptr,
    R,
    count,
    y_r,
    y_h,
    w_r,
    w_h,
    H: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of y, window [R,H,V] and logit [R,H], and each program's sums of scale's and part's, [programs,2,H,V]."""
    program, programs, h = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr + h * V + d, mask=d < V, other=0.0)[None, :]
    part = tl.load(part_ptr + h * V + d, mask=d < V, other=0.0)[None, :]
    scale_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    part_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in range(0, count):
        row = (program + i * programs) * ROWS + tl.arange(0, ROWS)
        ok = (row < R)[:, None] & (d < V)[None, :]
        y, w, share, rest = _read(y_ptr, window_ptr, logit_ptr, row, h, d, row < R, ok, y_r, y_h, w_r, w_h, H)
        place = (row.to(tl.int64)[:, None] * H + h) * V + d[None, :]
        do = tl.load(do_ptr + place, mask=ok, other=0.0).to(tl.float32)
        shared = do * share
        tl.store(dy_ptr + place, (shared * scale).to(dy_ptr.dtype.element_ty), mask=ok)
        tl.store(dwindow_ptr + place, (do - shared * part).to(dwindow_ptr.dtype.element_ty), mask=ok)
        slope = share * rest * tl.sum(do * (scale * y - part * w), 1)[:, None]
        tl.store(dlogit_ptr + row.to(tl.int64)[:, None] * H + h, slope, mask=(row < R)[:, None])
        scale_sum += shared * y
        part_sum -= shared * w
    spot = sums_ptr + (program.to(tl.int64) * 2 * H + h) * V + d
    tl.store(spot, tl.sum(scale_sum, 0), mask=d < V)
    tl.store(spot + H * V, tl.sum(part_sum, 0), mask=d < V)


def _settings(y: Tensor, window: Tensor, summed: bool) -> tuple[Tiles, list[int], dict[str, Any]]:
    """The tiles, strides and options that a kernel is launched with."""
    R, H, V = y.shape
    block = triton.next_power_of_2(V)
    split = tiles(R, block, H, summed=summed)
    strides = [t.stride(axis) for t in (y, window) for axis in (0, 1)]
    return split, strides, {"H": H, "V": V, "ROWS": split.rows, "BLOCK": block, "num_warps": split.warps}


def forward(y: Tensor, window: Tensor, logit: Tensor, scale: Tensor, window_part: Tensor) -> Tensor:
    """y, window [R,H,V] of unit stride in the last, logit [R,H] and scale, window_part [H,V] in float32 -> [R,H,V]."""
    o = window.new_empty(window.shape)
    split, strides, options = _settings(y, window, summed=False)
    _forward[split.programs, y.shape[1]](y, window, logit, scale, window_part, o, y.shape[0], *strides, **options)
    return o


def backward(
    y: Tensor, window: Tensor, logit: Tensor, scale: Tensor, window_part: Tensor, do: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of y, window and logit, and of scale and window_part as one [2,H,V]; do is contiguous."""
    R, H, V = y.shape
    dy, dwindow, dlogit = y.new_empty(y.shape), window.new_empty(window.shape), torch.empty_like(logit)
    split, strides, options = _settings(y, window, summed=True)
    sums = logit.new_empty(split.programs, 2, H, V)
    inputs, outputs = (y, window, logit, scale, window_part, do), (dy, dwindow, dlogit, sums)
    _backward[split.programs, H](*inputs, *outputs, R, split.count, *strides, **options)
    return dy, dwindow, dlogit, sums.sum(0)
