"""One token of RAT with a window on the GPU, in one launch: the ring and the summaries in reach are read once.

Bound: the bytes of those over the memory bandwidth. A program takes the query heads of one sequence that share their
keys. It reads the new pair from k and v, never from its slot. What a row has seen is read on the device, so that a
CUDA graph can be replayed.

Suffixes: B batch, H query heads, R of them per kv head, K width; M query heads and N keys in a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.linear_attention.triton_common import dot_precision, operand_dtype
from linearize.kernels.rat_attention.launch import width_block
from linearize.kernels.window_attention.triton_band import LOG2E, capped


@triton.jit
def _absorb(
    acc, top, total, q, key, value, seen, extra, logit_scale, cap, CAPPED: tl.constexpr, PRECISION: tl.constexpr
):
    """The running softmax with a block of keys taken in."""
    s, _tanh = capped(tl.dot(q, tl.trans(key), input_precision=PRECISION), logit_scale, cap, CAPPED)
    s = tl.where(seen[None, :], s + extra[:, None], float("-inf"))
    highest = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - highest[:, None])
    shrink = tl.exp2(top - highest)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
    return acc, highest, total


@triton.jit(do_not_specialize=["slots", "window", "reach"])
def _step(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    offset_ptr,
    ring_k_ptr,
    ring_v_ptr,
    position_ptr,
    o_ptr,
    slots,
    window,
    reach,
    logit_scale,
    cap,
    keys_b,
    keys_n,
    keys_h,
    values_b,
    values_n,
    values_h,
    ring_k_b,
    ring_k_n,
    ring_k_h,
    ring_v_b,
    ring_v_n,
    ring_v_h,
    H: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    RING: tl.constexpr,
    REACH: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q, k, v and o are contiguous; slots and ring have unit stride in K."""
    g = tl.program_id(0) % (H // R)
    b = (tl.program_id(0) // (H // R)).to(tl.int64)
    position = tl.load(position_ptr + b)
    i = tl.arange(0, K_BLOCK)
    r = tl.arange(0, M)
    row = (b * H + g * R + r)[:, None] * K + i[None, :]
    ok = (r < R)[:, None] & (i < K)[None, :]
    q = tl.load(q_ptr + row, mask=ok, other=0.0)
    pair = (b * (H // R) + g) * K + i
    new_k = tl.load(k_ptr + pair, mask=i < K, other=0.0)
    new_v = tl.load(v_ptr + pair, mask=i < K, other=0.0)
    offset = tl.load(offset_ptr + g * R + r, mask=r < R, other=0.0) * 1.4426950408889634
    top, _own = capped(tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1), logit_scale, cap, CAPPED)
    total = tl.full([M], 1.0, tl.float32)
    acc = tl.zeros([M, K_BLOCK], tl.float32) + new_v.to(tl.float32)[None, :]

    farthest = position * 0
    if REACH:
        farthest = tl.maximum(position - reach + 1, 0)
    exact = position // C * C
    if RING:
        exact = tl.maximum(position - window + 1, 0) // C * C
        from_token = tl.maximum(exact, farthest)
        ring_k_ptr += b * ring_k_b + g * ring_k_h
        ring_v_ptr += b * ring_v_b + g * ring_v_h
        for start in range(0, (position - from_token).to(tl.int32), N):
            token = from_token + start + tl.arange(0, N)
            seen = token < position
            n = (token % slots).to(tl.int64)[:, None]
            here = seen[:, None] & (i < K)[None, :]
            key = tl.load(ring_k_ptr + n * ring_k_n + i[None, :], mask=here, other=0.0).to(q.dtype)
            value = tl.load(ring_v_ptr + n * ring_v_n + i[None, :], mask=here, other=0.0).to(q.dtype)
            acc, top, total = _absorb(
                acc, top, total, q, key, value, seen, offset * 0.0, logit_scale, cap, CAPPED, PRECISION
            )
        slot = position % slots
        tl.store(ring_k_ptr + slot * ring_k_n + i, new_k.to(ring_k_ptr.dtype.element_ty), mask=i < K)
        tl.store(ring_v_ptr + slot * ring_v_n + i, new_v.to(ring_v_ptr.dtype.element_ty), mask=i < K)
    keys_ptr += b * keys_b + g * keys_h
    values_ptr += b * values_b + g * values_h
    end = (exact // C).to(tl.int32)
    for start in range((farthest // C).to(tl.int32), end, N):
        n = start + tl.arange(0, N)
        here = (n < end)[:, None] & (i < K)[None, :]
        wide_n = n.to(tl.int64)[:, None]
        key = tl.load(keys_ptr + wide_n * keys_n + i[None, :], mask=here, other=0.0).to(q.dtype)
        value = tl.load(values_ptr + wide_n * values_n + i[None, :], mask=here, other=0.0).to(q.dtype)
        acc, top, total = _absorb(acc, top, total, q, key, value, n < end, offset, logit_scale, cap, CAPPED, PRECISION)
    tl.store(o_ptr + row, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=ok)


def step(
    q_BHK: Tensor,
    k_BGK: Tensor,
    v_BGK: Tensor,
    keys_BNGK: Tensor,
    values_BNGK: Tensor,
    offset_H: Tensor,
    ring: tuple[Tensor, Tensor] | None,
    position_B: Tensor,
    window: int,
    C: int,
    reach: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Arguments as `rat_window_attention_step`, already checked; slots and ring with unit stride in K."""
    (B, H, K), G = q_BHK.shape, k_BGK.shape[1]
    dtype = operand_dtype(q_BHK, k_BGK, v_BGK)
    q, k, v = (x.to(dtype).contiguous() for x in (q_BHK, k_BGK, v_BGK))
    o = torch.empty(B, H, K, dtype=v_BGK.dtype, device=v.device)
    size, block = q.element_size(), width_block(K, q.element_size())
    ring_strides: tuple[Any, ...] = (0,) * 6 if ring is None else (*ring[0].stride()[:3], *ring[1].stride()[:3])
    wide = K > 128 or size > 2
    with on_device(q):
        _step[(B * G,)](
            q, k, v, keys_BNGK, values_BNGK, offset_H.float().contiguous(), *(ring or (None, None)),
            position_B.contiguous(), o, 1 if ring is None else ring[0].shape[1], window, reach or 0,
            scale * LOG2E if softcap is None else scale / softcap, 0.0 if softcap is None else softcap * LOG2E,
            *keys_BNGK.stride()[:3], *values_BNGK.stride()[:3], *ring_strides,
            H=H, R=H // G, C=C, K=K, M=max(64 if size <= 2 else 16, triton.next_power_of_2(H // G)),
            N=32 if size > 2 else 64, K_BLOCK=block, RING=ring is not None, REACH=reach is not None,
            CAPPED=softcap is not None, PRECISION=dot_precision(dtype),
            num_warps=8 if wide else 4, num_stages=1 if wide else 2,
        )  # fmt: skip
    return o
