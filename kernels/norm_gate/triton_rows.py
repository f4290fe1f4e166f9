"""Normalised and gated rows on the GPU: one kernel forward, one backward, which makes everything again.

A program takes tiles of rows of one head, each row whole, so that x, gate and the gradients are read once. The gain's
gradient is summed over a program's tiles and then over programs, in a fixed order.

Bound: memory. In 16 bits the forward pass moves 6 bytes per element (x, gate, y), the backward pass 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.rows import Tiles, tiles
from linearize.kernels.triton_math import sigmoid


@dataclass(frozen=True)
class Form:
    """Which of the forms a call has."""

    gate_first: bool
    swish: bool
    eps: float


@triton.jit
def _factor(g, SWISH: tl.constexpr):
    """The gate's factor and its derivative."""
    opened, shut = sigmoid(g)
    factor = opened
    slope = opened * shut
    if SWISH:
        factor = g * opened
        slope = opened + factor * shut
    return factor, slope


@triton.jit(do_not_specialize=["R"])
def _forward(
    x_ptr,
    weight_ptr,
    gate_ptr,
    y_ptr,
    R,
    eps,
    x_r,
    x_h,
    g_r,
    g_h,
    H: tl.constexpr,
    V: tl.constexpr,
    WEIGHT: tl.constexpr,
    GATE: tl.constexpr,
    FIRST: tl.constexpr,
    SWISH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y [R,H,V]; see the module's docstring."""
    h = tl.program_id(1)
    v = tl.arange(0, BLOCK)
    head = h.to(tl.int64)
    weight = tl.full([BLOCK], 1.0, tl.float32)
    if WEIGHT:
        weight = tl.load(weight_ptr + head * V + v, mask=v < V, other=0.0)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ok = (row < R)[:, None] & (v < V)[None, :]
    y = tl.load(x_ptr + row[:, None] * x_r + head * x_h + v[None, :], mask=ok, other=0.0).to(tl.float32)
    factor = tl.full([ROWS, BLOCK], 1.0, tl.float32)
    if GATE:
        g = tl.load(gate_ptr + row[:, None] * g_r + head * g_h + v[None, :], mask=ok, other=0.0)
        factor, _ = _factor(g.to(tl.float32), SWISH)
    if FIRST:
        y *= factor
    y *= (1.0 / tl.sqrt(tl.sum(y * y, 1) / V + eps))[:, None] * weight[None, :]
    if not FIRST:
        y *= factor
    spot = (row * H + head)[:, None] * V + v[None, :]
    tl.store(y_ptr + spot, y.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["R", "count"])
def _backward(
    x_ptr,
    weight_ptr,
    gate_ptr,
    dy_ptr,
    dx_ptr,
    dgate_ptr,
    sums_ptr,
    R,
    count,
    eps,
    x_r,
    x_h,
    g_r,
    g_h,
    H: tl.constexpr,
    V: tl.constexpr,
    WEIGHT: tl.constexpr,
    GATE: tl.constexpr,
    FIRST: tl.constexpr,
    SWISH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx and dgate [R,H,V], and each program's sums for the gain, [programs,H,V]."""
    program, programs, h = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    v = tl.arange(0, BLOCK)
    head = h.to(tl.int64)
    weight = tl.full([BLOCK], 1.0, tl.float32)
    if WEIGHT:
        weight = tl.load(weight_ptr + head * V + v, mask=v < V, other=0.0)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    for i in range(0, count):
        row = ((program + i * programs) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        ok = (row < R)[:, None] & (v < V)[None, :]
        spot = (row * H + head)[:, None] * V + v[None, :]
        x = tl.load(x_ptr + row[:, None] * x_r + head * x_h + v[None, :], mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + spot, mask=ok, other=0.0).to(tl.float32)
        factor = tl.full([ROWS, BLOCK], 1.0, tl.float32)
        slope = tl.zeros([ROWS, BLOCK], tl.float32)
        if GATE:
            g = tl.load(gate_ptr + row[:, None] * g_r + head * g_h + v[None, :], mask=ok, other=0.0)
            factor, slope = _factor(g.to(tl.float32), SWISH)
        # What is normalised, its gradient, and what the gain multiplies besides.
        inner = x
        after = factor
        if FIRST:
            inner = x * factor
            after = tl.full([ROWS, BLOCK], 1.0, tl.float32)
        scale = (1.0 / tl.sqrt(tl.sum(inner * inner, 1) / V + eps))[:, None]
        unit = inner * scale
        dunit = dy * after * weight[None, :]
        dinner = scale * (dunit - unit * (tl.sum(unit * dunit, 1) / V)[:, None])
        weight_sum += tl.sum(dy * after * unit, 0)
        dx = dinner
        dgate = dy * weight[None, :] * unit * slope
        if FIRST:
            dx = dinner * factor
            dgate = dinner * x * slope
        tl.store(dx_ptr + spot, dx.to(dx_ptr.dtype.element_ty), mask=ok)
        if GATE:
            tl.store(dgate_ptr + spot, dgate.to(dgate_ptr.dtype.element_ty), mask=ok)
    if WEIGHT:
        tl.store(sums_ptr + (program * H + head) * V + v, weight_sum, mask=v < V)


def _settings(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, form: Form, summed: bool
) -> tuple[Tiles, list[int], dict[str, Any]]:
    """The tiles, strides and options that a kernel is launched with."""
    R, H, V = x.shape
    block = triton.next_power_of_2(V)
    split = tiles(R, block, H, summed=summed)
    other = x if gate is None else gate
    strides = [t.stride(axis) for t in (x, other) for axis in (0, 1)]
    options = {"H": H, "V": V, "WEIGHT": weight is not None, "GATE": gate is not None}
    options |= {"FIRST": form.gate_first and gate is not None, "SWISH": form.swish}
    options |= {"ROWS": split.rows, "BLOCK": block, "num_warps": split.warps}
    return split, strides, options


def norm_gate_forward(x: Tensor, weight: Tensor | None, gate: Tensor | None, form: Form) -> Tensor:
    """y [R,H,V] of x and gate [R,H,V] and a float32 weight [H,V]."""
    y = x.new_empty(x.shape)
    R, H, _ = x.shape
    split, strides, options = _settings(x, weight, gate, form, summed=False)
    weight, gate = x if weight is None else weight, x if gate is None else gate
    _forward[split.programs, H](x, weight, gate, y, R, form.eps, *strides, **options)
    return y


def norm_gate_backward(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, dy: Tensor, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dgate (empty without a gate) and dweight [H,V] (zeros without a weight)."""
    dx = x.new_empty(x.shape)
    dgate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    R, H, V = x.shape
    split, strides, options = _settings(x, weight, gate, form, summed=weight is not None)
    sums = x.new_empty(0 if weight is None else split.programs, H, V, dtype=torch.float32)
    weight, gate = x if weight is None else weight, x if gate is None else gate
    _backward[split.programs, H](x, weight, gate, dy, dx, dgate, sums, R, split.count, form.eps, *strides, **options)
    return dx, dgate, sums.sum(0)
