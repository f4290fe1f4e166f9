"""DDTS gates on the GPU: one kernel forward, one backward, which makes everything again from the inputs.

A program takes tiles of tokens of one head. Gradients of the biases are summed over a program's tiles and then over
programs, in a fixed order.

With SILU the key passes through SiLU first.

Bound: memory. In 16 bits the forward pass moves 12 bytes per element (a, b, k; log decay in float32 and k̂), the
backward pass 18.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.rows import Tiles, tiles
from linearize.kernels.triton_math import sigmoid, softplus


@triton.jit
def _gates(x, y):
    """softplus(x), sigmoid(x), log softplus(x), d log softplus / dx, sigmoid(y), sigmoid(-y)."""
    rate, rise = softplus(x)
    tiny = x < -15.0  # softplus(x) is e^x, which may be 0
    safe = tl.where(tiny, 1.0, rate)
    temperature, rest = sigmoid(y)
    return rate, rise, tl.where(tiny, x, tl.log(safe)), tl.where(tiny, 1.0, rise / safe), temperature, rest


@triton.jit
def _load(ptr, row, row_stride, h, head_stride, d, ok):
    spot = row.to(tl.int64)[:, None] * row_stride + h.to(tl.int64) * head_stride + d[None, :]
    return tl.load(ptr + spot, mask=ok, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["R"])
def _forward(
    a_ptr,
    b_ptr,
    k_ptr,
    a_bias_ptr,
    b_bias_ptr,
    decay_ptr,
    key_ptr,
    R,
    eps,
    a_r,
    a_h,
    b_r,
    b_h,
    k_r,
    k_h,
    H: tl.constexpr,
    K: tl.constexpr,
    A_BIAS: tl.constexpr,
    B_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log decay and gated key, [R,H,K]; see the module's docstring."""
    h = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    a_bias = tl.load(a_bias_ptr + h * K + d, mask=d < K, other=0.0) if A_BIAS else tl.zeros([BLOCK], tl.float32)
    b_bias = tl.load(b_bias_ptr + h * K + d, mask=d < K, other=0.0) if B_BIAS else tl.zeros([BLOCK], tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = (row < R)[:, None] & (d < K)[None, :]
    x = _load(a_ptr, row, a_r, h, a_h, d, ok) + a_bias[None, :]
    y = _load(b_ptr, row, b_r, h, b_h, d, ok) + b_bias[None, :]
    k = _load(k_ptr, row, k_r, h, k_h, d, ok)
    if SILU:
        k = k * sigmoid(k)[0]
    rate, _, log_rate, _, temperature, _ = _gates(x, y)
    length = tl.maximum(tl.sqrt(tl.sum(k * k, 1)), eps)
    key = k / length[:, None] * tl.exp(temperature * log_rate)
    spot = (row.to(tl.int64) * H + h)[:, None] * K + d[None, :]
    tl.store(decay_ptr + spot, -rate * temperature, mask=ok)
    tl.store(key_ptr + spot, key.to(key_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["R", "count"])
def _backward(
    a_ptr,
    b_ptr,
    k_ptr,
    a_bias_ptr,
    b_bias_ptr,
    ddecay_ptr,
    dkey_ptr,
    da_ptr,
    db_ptr,
    dk_ptr,
    sums_ptr,
    R,
    count,
    eps,
    a_r,
    a_h,
    b_r,
    b_h,
    k_r,
    k_h,
    H: tl.constexpr,
    K: tl.constexpr,
    A_BIAS: tl.constexpr,
    B_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """da, db, dk [R,H,K] and each program's sums of da and db, [programs,2,H,K]."""
    program, programs, h = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    a_bias = tl.load(a_bias_ptr + h * K + d, mask=d < K, other=0.0) if A_BIAS else tl.zeros([BLOCK], tl.float32)
    b_bias = tl.load(b_bias_ptr + h * K + d, mask=d < K, other=0.0) if B_BIAS else tl.zeros([BLOCK], tl.float32)
    a_sum = tl.zeros([BLOCK], tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i in range(0, count):
        row = (program + i * programs) * ROWS + tl.arange(0, ROWS)
        ok = (row < R)[:, None] & (d < K)[None, :]
        x = _load(a_ptr, row, a_r, h, a_h, d, ok) + a_bias[None, :]
        y = _load(b_ptr, row, b_r, h, b_h, d, ok) + b_bias[None, :]
        k = _load(k_ptr, row, k_r, h, k_h, d, ok)
        if SILU:
            rises, falls = sigmoid(k)
            slope = rises * (1.0 + k * falls)
            k *= rises
        ddecay = _load(ddecay_ptr, row, H * K, h, K, d, ok)
        dkey = _load(dkey_ptr, row, H * K, h, K, d, ok)
        rate, rise, log_rate, log_rise, temperature, rest = _gates(x, y)
        gate = tl.exp(temperature * log_rate)
        norm = tl.sqrt(tl.sum(k * k, 1))[:, None]
        length = tl.maximum(norm, eps)
        unit = k / length
        dunit = dkey * gate
        dlog = dunit * unit  # of the gate's logarithm
        da = temperature * (dlog * log_rise - ddecay * rise)
        db = (dlog * log_rate - ddecay * rate) * temperature * rest
        along = tl.where(norm >= eps, tl.sum(dlog, 1)[:, None], 0.0)
        dk = (dunit - unit * along) / length
        if SILU:
            dk *= slope
        spot = (row.to(tl.int64) * H + h)[:, None] * K + d[None, :]
        tl.store(da_ptr + spot, da.to(da_ptr.dtype.element_ty), mask=ok)
        tl.store(db_ptr + spot, db.to(db_ptr.dtype.element_ty), mask=ok)
        tl.store(dk_ptr + spot, dk.to(dk_ptr.dtype.element_ty), mask=ok)
        a_sum += tl.sum(tl.where(ok, da, 0.0), 0)
        b_sum += tl.sum(tl.where(ok, db, 0.0), 0)
    spot = (program * 2 * H + h) * K + d
    if A_BIAS:
        tl.store(sums_ptr + spot, a_sum, mask=d < K)
    if B_BIAS:
        tl.store(sums_ptr + spot + H * K, b_sum, mask=d < K)


def _settings(
    a: Tensor, b: Tensor, k: Tensor, a_bias: Tensor | None, b_bias: Tensor | None, silu: bool, **tiling: Any
) -> tuple[Tiles, list[int], dict[str, Any]]:
    """The tiles, strides and options that a kernel is launched with."""
    R, H, K = k.shape
    block = triton.next_power_of_2(K)
    split = tiles(R, block, H, **tiling)
    strides = [t.stride(axis) for t in (a, b, k) for axis in (0, 1)]
    options = {"H": H, "K": K, "A_BIAS": a_bias is not None, "B_BIAS": b_bias is not None, "SILU": silu}
    options |= {"ROWS": split.rows, "BLOCK": block, "num_warps": split.warps}
    return split, strides, options


def ddts_forward(
    a: Tensor, b: Tensor, k: Tensor, a_bias: Tensor | None, b_bias: Tensor | None, silu: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Log decay and gated key [R,H,K] of a, b, k [R,H,K] and biases [H,K] in float32."""
    decay, key = k.new_empty(k.shape, dtype=torch.float32), k.new_empty(k.shape)
    split, strides, options = _settings(a, b, k, a_bias, b_bias, silu)
    _forward[split.programs, k.shape[1]](
        a,
        b,
        k,
        decay if a_bias is None else a_bias,
        decay if b_bias is None else b_bias,
        decay,
        key,
        k.shape[0],
        eps,
        *strides,
        **options,
    )
    return decay, key


def ddts_backward(
    a: Tensor,
    b: Tensor,
    k: Tensor,
    a_bias: Tensor | None,
    b_bias: Tensor | None,
    ddecay: Tensor,
    dkey: Tensor,
    silu: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """da, db, dk [R,H,K], and the gradients of both biases [2,H,K] (unset where there is none)."""
    da, db, dk = (x.new_empty(x.shape) for x in (a, b, k))
    R, H, K = k.shape
    biased = a_bias is not None or b_bias is not None
    split, strides, options = _settings(a, b, k, a_bias, b_bias, silu, summed=biased, share=2 if silu else 1)
    sums = k.new_empty(split.programs if biased else 0, 2, H, K, dtype=torch.float32)
    biases = (ddecay if a_bias is None else a_bias, ddecay if b_bias is None else b_bias)
    inputs, outputs = (a, b, k, *biases, ddecay, dkey), (da, db, dk, sums)
    _backward[split.programs, H](*inputs, *outputs, R, split.count, eps, *strides, **options)
    return da, db, dk, sums.sum(0)
