"""The softplus-rate gate on the GPU: one kernel forward, one backward.

A program takes tiles of tokens and a block of channels; gradients of A_log and the bias are summed over its tiles and
then over programs, in a fixed order. Bound: memory; in 16 bits 10 bytes per element forward, 12 backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.rows import tiles
from linearize.kernels.triton_math import softplus

BLOCK = 128


@triton.jit(do_not_specialize=["R"])
def _forward(
    x_ptr,
    log_ptr,
    bias_ptr,
    decay_ptr,
    step_ptr,
    R,
    x_r,
    C: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log decay and step, [R,C]."""
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    speed = tl.exp(tl.load(log_ptr + c, mask=c < C, other=0.0))
    bias = tl.load(bias_ptr + c, mask=c < C, other=0.0) if BIAS else tl.zeros([BLOCK], tl.float32)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ok = (row < R)[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_r + c[None, :], mask=ok, other=0.0).to(tl.float32)
    step, _ = softplus(x + bias[None, :])
    spot = row[:, None] * C + c[None, :]
    tl.store(decay_ptr + spot, -speed[None, :] * step, mask=ok)
    tl.store(step_ptr + spot, step, mask=ok)


@triton.jit(do_not_specialize=["R", "count"])
def _backward(
    x_ptr,
    log_ptr,
    bias_ptr,
    ddecay_ptr,
    dstep_ptr,
    dx_ptr,
    sums_ptr,
    R,
    count,
    x_r,
    C: tl.constexpr,
    BIAS: tl.constexpr,
    DECAY: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx [R,C], and each program's sums for A_log and for the bias, [programs,2,C]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    speed = tl.exp(tl.load(log_ptr + c, mask=c < C, other=0.0))
    bias = tl.load(bias_ptr + c, mask=c < C, other=0.0) if BIAS else tl.zeros([BLOCK], tl.float32)
    log_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    for i in range(0, count):
        row = ((program + i * programs) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        ok = (row < R)[:, None] & (c < C)[None, :]
        spot = row[:, None] * C + c[None, :]
        x = tl.load(x_ptr + row[:, None] * x_r + c[None, :], mask=ok, other=0.0).to(tl.float32)
        step, rise = softplus(x + bias[None, :])
        dstep = tl.zeros([ROWS, BLOCK], tl.float32)
        if STEP:
            dstep += tl.load(dstep_ptr + spot, mask=ok, other=0.0)
        if DECAY:
            slow = -speed[None, :] * tl.load(ddecay_ptr + spot, mask=ok, other=0.0)
            dstep += slow
            log_sum += tl.sum(slow * step, 0)
        dx = dstep * rise
        bias_sum += tl.sum(dx, 0)
        tl.store(dx_ptr + spot, dx.to(dx_ptr.dtype.element_ty), mask=ok)
    spot = program * 2 * C + c
    tl.store(sums_ptr + spot, log_sum, mask=c < C)
    tl.store(sums_ptr + spot + C, bias_sum, mask=c < C)


def softplus_forward(x: Tensor, A_log: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log decay and step, float32 [R,C], of x [R,C] and float32 A_log and bias [C]."""
    R, C = x.shape
    decay, step = (x.new_empty(R, C, dtype=torch.float32) for _ in range(2))
    blocks = triton.cdiv(C, BLOCK)
    split = tiles(R, BLOCK, blocks)
    _forward[split.programs, blocks](
        x,
        A_log,
        A_log if bias is None else bias,
        decay,
        step,
        R,
        x.stride(0),
        C,
        BIAS=bias is not None,
        ROWS=split.rows,
        BLOCK=BLOCK,
        num_warps=split.warps,
    )
    return decay, step


def softplus_backward(
    x: Tensor, A_log: Tensor, bias: Tensor | None, ddecay: Tensor | None, dstep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dx [R,C] and the gradients of A_log and the bias, [2,C]."""
    R, C = x.shape
    dx = x.new_empty(R, C)
    blocks = triton.cdiv(C, BLOCK)
    split = tiles(R, BLOCK, blocks, summed=True)
    sums = x.new_empty(split.programs, 2, C, dtype=torch.float32)
    _backward[split.programs, blocks](
        x,
        A_log,
        A_log if bias is None else bias,
        A_log if ddecay is None else ddecay,
        A_log if dstep is None else dstep,
        dx,
        sums,
        R,
        split.count,
        x.stride(0),
        C,
        BIAS=bias is not None,
        DECAY=ddecay is not None,
        STEP=dstep is not None,
        ROWS=split.rows,
        BLOCK=BLOCK,
        num_warps=split.warps,
    )
    return dx, sums.sum(0)
