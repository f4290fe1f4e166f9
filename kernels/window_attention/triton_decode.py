"""One token of window attention on the GPU, in one launch: the new pair goes into its slot, the others are read once.

Bound: the slots' bytes over the memory bandwidth. A program takes the query heads of one sequence that share their
keys and values; it reads the new pair from k and v, never from its slot, so that no program waits for another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.linear_attention.triton_common import dot_precision, operand_dtype
from linearize.kernels.window_attention.triton_band import LOG2E, capped, shared_heads, width_block


@triton.jit(do_not_specialize=["slots", "window", "sinks"])
def _step(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    position_ptr,
    real_ptr,
    o_ptr,
    lse_ptr,
    slots,
    window,
    sinks,
    logit_scale,
    cap,
    position_b,
    keys_b,
    keys_n,
    keys_h,
    keys_k,
    values_b,
    values_n,
    values_h,
    values_v,
    H: tl.constexpr,
    R: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q, k, v and the outputs are contiguous; the slots have any strides."""
    group = tl.program_id(0) % (H // R)
    b = (tl.program_id(0) // (H // R)).to(tl.int64)
    head = group * R
    key_head = head // K_GROUP
    value_head = head // V_GROUP
    position = tl.load(position_ptr + b * position_b)
    ring = slots - sinks
    here = tl.where(position < sinks, position, sinks + (position - sinks) % ring)
    real = tl.full([], 1, tl.int1)
    if MASKED:
        real = tl.load(real_ptr + b) != 0

    ik = tl.arange(0, K_BLOCK)
    iv = tl.arange(0, V_BLOCK)
    r = tl.arange(0, M)
    q_spot = q_ptr + (b * H + head + r)[:, None] * K + ik[None, :]
    q = tl.load(q_spot, mask=(r < R)[:, None] & (ik < K)[None, :], other=0.0)
    new_k = tl.load(k_ptr + (b * (H // K_GROUP) + key_head) * K + ik, mask=ik < K, other=0.0)
    new_v = tl.load(v_ptr + (b * (H // V_GROUP) + value_head) * V + iv, mask=iv < V, other=0.0)
    keys_ptr += b * keys_b + key_head * keys_h
    values_ptr += b * values_b + value_head * values_h
    tl.store(
        keys_ptr + here * keys_n + ik * keys_k, new_k.to(keys_ptr.dtype.element_ty), mask=tl.where(real, ik, K) < K
    )
    tl.store(
        values_ptr + here * values_n + iv * values_v,
        new_v.to(values_ptr.dtype.element_ty),
        mask=tl.where(real, iv, V) < V,
    )

    top, _own = capped(tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1), logit_scale, cap, CAPPED)
    total = tl.full([M], 1.0, tl.float32)
    acc = tl.zeros([M, V_BLOCK], tl.float32) + new_v.to(tl.float32)[None, :]
    for first in range(0, tl.minimum(position, slots.to(tl.int64)).to(tl.int32), N):
        n = first + tl.arange(0, N)
        age = (position - n + ring) % ring
        seen = tl.where(n < sinks, n < position, (age < window) & (age <= position - sinks)) & (n != here)
        seen = seen & (n < slots)
        key_spot = keys_ptr + n.to(tl.int64)[:, None] * keys_n + ik[None, :] * keys_k
        key = tl.load(key_spot, mask=seen[:, None] & (ik < K)[None, :], other=0.0).to(q.dtype)
        s, _tanh = capped(tl.dot(q, tl.trans(key), input_precision=PRECISION), logit_scale, cap, CAPPED)
        s = tl.where(seen[None, :], s, float("-inf"))
        highest = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - highest[:, None])
        shrink = tl.exp2(top - highest)
        value_spot = values_ptr + n.to(tl.int64)[:, None] * values_n + iv[None, :] * values_v
        value = tl.load(value_spot, mask=seen[:, None] & (iv < V)[None, :], other=0.0).to(q.dtype)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = highest
    o = tl.where(real, acc / total[:, None], 0.0)
    lse = tl.where(real, (top + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    place = b * H + head + r
    o_spot = o_ptr + place[:, None] * V + iv[None, :]
    tl.store(o_spot, o.to(o_ptr.dtype.element_ty), mask=(r < R)[:, None] & (iv < V)[None, :])
    tl.store(lse_ptr + place, lse, mask=r < R)


@torch.library.custom_op(
    "linearize::window_attention_step",
    mutates_args=("keys", "values"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor position, int window, int sinks, "
    "float scale, float? softcap, Tensor? key_mask) -> (Tensor, Tensor)",
)
def _step_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return _launch(q, k, v, keys, values, position, window, sinks, scale, softcap, key_mask)


@_step_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    B, H, _K = q.shape
    return v.new_empty(B, H, v.shape[2]), q.new_empty(B, H, dtype=torch.float32)


def step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    keys_BNHK: Tensor,
    values_BNHV: Tensor,
    position_B: Tensor,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None,
    real_B: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Arguments as `window_attention_step`, already checked. A custom operator only to torch.compile."""
    run = _step_op if torch.compiler.is_compiling() else _launch
    return run(q_BHK, k_BHK, v_BHV, keys_BNHK, values_BNHV, position_B, window, sinks, scale, softcap, real_B)


def _launch(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    keys_BNHK: Tensor,
    values_BNHV: Tensor,
    position_B: Tensor,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None,
    real_B: Tensor | None,
) -> tuple[Tensor, Tensor]:
    (B, H, K), V = q_BHK.shape, v_BHV.shape[2]
    Hk, Hv = k_BHK.shape[1], v_BHV.shape[1]
    dtype = operand_dtype(q_BHK, k_BHK, v_BHV)
    q, k, v = (x.to(dtype).contiguous() for x in (q_BHK, k_BHK, v_BHV))
    o = torch.empty(B, H, V, dtype=v_BHV.dtype, device=v.device)
    lse = torch.empty(B, H, dtype=torch.float32, device=v.device)
    R, size = shared_heads(H, Hk, Hv), q.element_size()
    wide = max(K, V) > 128 or size > 2
    with on_device(q):
        _step[(B * (H // R),)](
            q,
            k,
            v,
            keys_BNHK,
            values_BNHV,
            position_B,
            None if real_B is None else real_B.contiguous(),
            o,
            lse,
            keys_BNHK.shape[1],
            window,
            sinks,
            scale * LOG2E if softcap is None else scale / softcap,
            0.0 if softcap is None else softcap * LOG2E,
            position_B.stride(0),
            *keys_BNHK.stride(),
            *values_BNHV.stride(),
            H=H,
            R=R,
            K_GROUP=H // Hk,
            V_GROUP=H // Hv,
            K=K,
            V=V,
            M=max(64 if size <= 2 else 16, triton.next_power_of_2(R)),
            N=32 if size > 2 else 64,
            K_BLOCK=width_block(K, size),
            V_BLOCK=width_block(V, size),
            CAPPED=softcap is not None,
            MASKED=real_B is not None,
            PRECISION=dot_precision(dtype),
            num_warps=8 if wide else 4,
            num_stages=1 if wide else 2,
        )
    return o, lse
