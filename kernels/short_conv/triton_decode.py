"""One token of the short convolution on the GPU, in one launch: the state moves up by one input in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.dispatch import on_device


@triton.jit
def _step(
    x_ptr,
    w_ptr,
    bias_ptr,
    state_ptr,
    y_ptr,
    x_b,
    x_d,
    w_d,
    w_i,
    bias_d,
    s_b,
    s_i,
    s_d,
    D: tl.constexpr,
    W: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    d_blocks: tl.constexpr = (D + D_BLOCK - 1) // D_BLOCK
    d = tl.program_id(0) % d_blocks * D_BLOCK + tl.arange(0, D_BLOCK)
    b = (tl.program_id(0) // d_blocks).to(tl.int64)
    ok = d < D
    x = tl.load(x_ptr + b * x_b + d * x_d, mask=ok, other=0.0)
    z = tl.load(w_ptr + d * w_d + (W - 1) * w_i, mask=ok, other=0.0).to(tl.float32) * x.to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + d * bias_d, mask=ok, other=0.0).to(tl.float32)
    spot = state_ptr + b * s_b + d * s_d
    for i in tl.static_range(W - 1):  # entry i is read before its place is taken by entry i + 1
        seen = tl.load(spot + i * s_i, mask=ok, other=0.0)
        z += tl.load(w_ptr + d * w_d + i * w_i, mask=ok, other=0.0).to(tl.float32) * seen.to(tl.float32)
        if i > 0:
            tl.store(spot + (i - 1) * s_i, seen, mask=ok)
    if W > 1:
        tl.store(spot + (W - 2) * s_i, x.to(state_ptr.dtype.element_ty), mask=ok)
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(y_ptr + b * D + d, z.to(y_ptr.dtype.element_ty), mask=ok)


@torch.library.custom_op(
    "linearize::short_conv_step",
    mutates_args=("state",),
    schema="(Tensor x, Tensor weight, Tensor(a!) state, Tensor? bias, bool silu) -> Tensor",
)
def _step_op(x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    return _launch(x, weight, state, bias, silu)


@_step_op.register_fake
def _(x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    return x.new_empty(x.shape)


def step(x_BD: Tensor, weight_DW: Tensor, state_BWD: Tensor, bias_D: Tensor | None, silu: bool) -> Tensor:
    """Arguments as `short_conv_step`, already checked. A custom operator only to torch.compile."""
    run = _step_op if torch.compiler.is_compiling() else _launch
    return run(x_BD, weight_DW, state_BWD, bias_D, silu)


def _launch(x_BD: Tensor, weight_DW: Tensor, state_BWD: Tensor, bias_D: Tensor | None, silu: bool) -> Tensor:
    (B, D), W = x_BD.shape, weight_DW.shape[1]
    y = torch.empty(B, D, dtype=x_BD.dtype, device=x_BD.device)
    block = min(256, triton.next_power_of_2(D))
    with on_device(x_BD):
        _step[(B * triton.cdiv(D, block),)](
            x_BD,
            weight_DW,
            bias_D,
            state_BWD,
            y,
            *x_BD.stride(),
            *weight_DW.stride(),
            0 if bias_D is None else bias_D.stride(0),
            *state_BWD.stride(),
            D=D,
            W=W,
            D_BLOCK=block,
            HAS_BIAS=bias_D is not None,
            SILU=silu,
            num_warps=2,
        )
    return y
