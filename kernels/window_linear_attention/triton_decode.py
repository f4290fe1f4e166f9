"""One token's linear sums on the GPU, in one launch after the window's: the sums are read once and written once.

Bound: 8·F·(V + 1) bytes per sequence and head over the memory bandwidth. A program takes one head and walks the
columns of its memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.window_linear_attention.reference import LARGEST_EXPONENT


@triton.jit(do_not_specialize=["slots", "window"])
def _add_rest(
    a_ptr,
    lse_ptr,
    values_ptr,
    position_ptr,
    phi_q_ptr,
    phi_k_ptr,
    mix_ptr,
    memory_ptr,
    normaliser_ptr,
    real_ptr,
    o_ptr,
    slots,
    window,
    values_b,
    values_n,
    values_h,
    values_v,
    LIMIT: tl.constexpr,
    H: tl.constexpr,
    V_GROUP: tl.constexpr,
    F_GROUP: tl.constexpr,
    F: tl.constexpr,
    V: tl.constexpr,
    F_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    SHIFTED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Everything but the slots is contiguous; positions are those before this token."""
    h = tl.program_id(0) % H
    b = (tl.program_id(0) // H).to(tl.int64)
    position = tl.load(position_ptr + b)
    real = tl.full([], 1, tl.int1)
    if MASKED:
        real = tl.load(real_ptr + b) != 0
    factor = tl.where(real, tl.where(position >= window, 1.0, 0.0), 0.0)
    f = tl.arange(0, F_BLOCK)
    head = b * H + h
    query = tl.load(phi_q_ptr + head * F + f, mask=f < F, other=0.0).to(tl.float32)
    key = tl.load(phi_k_ptr + (b * (H // F_GROUP) + h // F_GROUP) * F + f, mask=f < F, other=0.0).to(tl.float32)
    key = tl.where(factor > 0.0, key, 0.0)
    normaliser = tl.load(normaliser_ptr + head * F + f, mask=f < F, other=0.0) + key
    tl.store(normaliser_ptr + head * F + f, normaliser, mask=f < F)
    s = tl.sum(query * normaliser)
    x = -tl.load(mix_ptr + h)
    if not SHIFTED:
        x += tl.load(lse_ptr + head)
    w = tl.exp(tl.minimum(tl.maximum(x, -LIMIT), LIMIT))
    slot = tl.where(position >= window, (position - window) % slots, 0)
    values_ptr += b * values_b + slot * values_n + h // V_GROUP * values_h
    for first in range(0, V, V_BLOCK):
        iv = first + tl.arange(0, V_BLOCK)
        spot = memory_ptr + (head * F + f)[:, None] * V + iv[None, :]
        inside = (f < F)[:, None] & (iv < V)[None, :]
        value = tl.load(values_ptr + iv * values_v, mask=iv < V, other=0.0).to(tl.float32)
        value = tl.where(factor > 0.0, value, 0.0)
        memory = tl.load(spot, mask=inside, other=0.0) + key[:, None] * value[None, :]
        tl.store(spot, memory, mask=inside)
        n = tl.sum(query[:, None] * memory, 0)
        a = tl.load(a_ptr + head * V + iv, mask=iv < V, other=0.0).to(tl.float32)
        o = tl.where(real, a + (n - s * a) / (s + w), 0.0)
        tl.store(o_ptr + head * V + iv, o.to(o_ptr.dtype.element_ty), mask=iv < V)


@torch.library.custom_op(
    "linearize::window_linear_step",
    mutates_args=("memory", "normaliser"),
    schema="(Tensor a, Tensor lse, Tensor values, Tensor position, Tensor phi_q, Tensor phi_k, Tensor mix, "
    "Tensor(a!) memory, Tensor(b!) normaliser, int window, str shift, Tensor? key_mask) -> Tensor",
)
def _step_op(
    a: Tensor,
    lse: Tensor,
    values: Tensor,
    position: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    mix: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    window: int,
    shift: str,
    key_mask: Tensor | None,
) -> Tensor:
    return _launch(a, lse, values, position, phi_q, phi_k, mix, memory, normaliser, window, shift, key_mask)


@_step_op.register_fake
def _(a: Tensor, *_: object) -> Tensor:
    return torch.empty_like(a)


def add_rest(
    inside: Tensor,
    lse: Tensor,
    values: Tensor,
    position: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    mix: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    window: int,
    shift: str,
    key_mask: Tensor | None,
) -> Tensor:
    """Arguments as the step's, already checked. A custom operator only to torch.compile."""
    run = _step_op if torch.compiler.is_compiling() else _launch
    return run(inside, lse, values, position, phi_q, phi_k, mix, memory, normaliser, window, shift, key_mask)


def _launch(
    a: Tensor,
    lse: Tensor,
    values: Tensor,
    position: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    mix: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    window: int,
    shift: str,
    key_mask: Tensor | None,
) -> Tensor:
    B, H, F, V = memory.shape
    o = torch.empty(B, H, V, dtype=a.dtype, device=a.device)
    f_block = triton.next_power_of_2(F)
    with on_device(a):
        _add_rest[(B * H,)](
            a.contiguous(),
            lse.contiguous(),
            values,
            position,
            phi_q.contiguous(),
            phi_k.contiguous(),
            mix.float().contiguous(),
            memory,
            normaliser,
            None if key_mask is None else key_mask.contiguous(),
            o,
            values.shape[1],
            window,
            *values.stride(),
            LIMIT=LARGEST_EXPONENT,
            H=H,
            V_GROUP=H // values.shape[2],
            F_GROUP=H // phi_k.shape[1],
            F=F,
            V=V,
            F_BLOCK=f_block,
            V_BLOCK=min(triton.next_power_of_2(V), max(16, 8192 // f_block)),
            SHIFTED=shift == "window",
            MASKED=key_mask is not None,
            num_warps=4,
        )
    return o
