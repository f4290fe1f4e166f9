"""RAT attention on the GPU: the backward kernels.

Probabilities are computed again from the saved log-sum-exp. One kernel takes blocks of queries for dq and the
own pairs' gradients, which it is the only one to write; a second takes blocks of chunk summaries, walks the
queries behind them and adds to the gradient of the pair each summary is, in place: the last token of its
chunk. Nothing is added atomically, so gradients repeat bit for bit.

Bounds: seven products per query and summary against the forward pass's two.

Suffixes as in `triton_forward.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.gated_scan.triton_scan import sum_groups
from linearize.kernels.linear_attention.triton_common import dot_precision
from linearize.kernels.rat_attention.triton_forward import _LOG2E, _summaries, attend_launch


@triton.jit(do_not_specialize=["T"])
def _queries(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    T,
    scale,
    log2e,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    do_b,
    do_t,
    do_h,
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
    """dq, delta = Σ do·o, and the gradients of the own pairs as such; all per query head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    t = block * M + tl.arange(0, M)
    i = tl.arange(0, K_BLOCK)
    ok = (t < T)[:, None] & (i < K)[None, :]
    row = t.to(tl.int64)[:, None]
    k_base = k_ptr + b * k_b + (h // K_GROUP) * k_h
    v_base = v_ptr + b * v_b + (h // V_GROUP) * v_h
    out = (b * T + row) * (H * K) + h * K + i[None, :]
    q = tl.load(q_ptr + b * q_b + h * q_h + row * q_t + i[None, :], mask=ok, other=0.0)
    do = tl.load(do_ptr + b * do_b + h * do_h + row * do_t + i[None, :], mask=ok, other=0.0)
    o = tl.load(o_ptr + out, mask=ok, other=0.0)
    own_k = tl.load(k_base + row * k_t + i[None, :], mask=ok, other=0.0).to(tl.float32)
    own_v = tl.load(v_base + row * v_t + i[None, :], mask=ok, other=0.0).to(tl.float32)
    wide_q = q.to(tl.float32)
    wide_do = do.to(tl.float32)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * T + t, mask=t < T, other=0.0)
    delta = tl.sum(wide_do * o.to(tl.float32), 1)
    tl.store(delta_ptr + bh.to(tl.int64) * T + t, delta, mask=t < T)

    p_own = tl.exp2(tl.sum(wide_q * own_k, 1) * (scale * log2e) - lse)
    ds_own = p_own * (tl.sum(wide_do * own_v, 1) - delta)
    tl.store(dk_ptr + out, (wide_q * (ds_own * scale)[:, None]).to(dk_ptr.dtype.element_ty), mask=ok)
    tl.store(dv_ptr + out, (wide_do * p_own[:, None]).to(dv_ptr.dtype.element_ty), mask=ok)
    dq = own_k * ds_own[:, None]

    chunk = t // C
    seen = (tl.minimum(block * M + M, T) - 1) // C
    for first in range(0, seen, N):
        n = first + tl.arange(0, N)
        key = _summaries(k_base, n, seen, i, k_t, C, K)
        value = _summaries(v_base, n, seen, i, v_t, C, K)
        s = tl.dot(q, tl.trans(key), input_precision=PRECISION) * (scale * log2e)
        p = tl.where(n[None, :] < chunk[:, None], tl.exp2(s - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision=PRECISION)
    tl.store(dq_ptr + out, (dq * scale).to(dq_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["T"])
def _chunks(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    T,
    scale,
    log2e,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    do_b,
    do_t,
    do_h,
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
    """Add the gradients of a block of summaries to those of the pairs they are; per query head."""
    first = tl.program_id(0) * N
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    n = first + tl.arange(0, N)
    i = tl.arange(0, K_BLOCK)
    seen = (T - 1) // C
    key = _summaries(k_ptr + b * k_b + (h // K_GROUP) * k_h, n, seen, i, k_t, C, K)
    value = _summaries(v_ptr + b * v_b + (h // V_GROUP) * v_h, n, seen, i, v_t, C, K)
    q_base = q_ptr + b * q_b + h * q_h + i[None, :]
    do_base = do_ptr + b * do_b + h * do_h + i[None, :]
    lse_base = lse_ptr + bh.to(tl.int64) * T
    delta_base = delta_ptr + bh.to(tl.int64) * T
    dk = tl.zeros([N, K_BLOCK], tl.float32)
    dv = tl.zeros([N, K_BLOCK], tl.float32)
    for start in range((first + 1) * C // M * M, T, M):
        t = start + tl.arange(0, M)
        ok = (t < T)[:, None] & (i < K)[None, :]
        row = t.to(tl.int64)[:, None]
        q = tl.load(q_base + row * q_t, mask=ok, other=0.0)
        do = tl.load(do_base + row * do_t, mask=ok, other=0.0)
        lse = tl.load(lse_base + t, mask=t < T, other=0.0)
        delta = tl.load(delta_base + t, mask=t < T, other=0.0)
        s = tl.dot(key, tl.trans(q), input_precision=PRECISION) * (scale * log2e)
        visible = (n[:, None] < (t // C)[None, :]) & (t < T)[None, :]
        p = tl.where(visible, tl.exp2(s - lse[None, :]), 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(value, tl.trans(do), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    ok = (n < seen)[:, None] & (i < K)[None, :]
    out = (b * T + n.to(tl.int64)[:, None] * C + (C - 1)) * (H * K) + h * K + i[None, :]
    dk = dk * scale + tl.load(dk_ptr + out, mask=ok, other=0.0).to(tl.float32)
    dv = dv + tl.load(dv_ptr + out, mask=ok, other=0.0).to(tl.float32)
    tl.store(dk_ptr + out, dk.to(dk_ptr.dtype.element_ty), mask=ok)
    tl.store(dv_ptr + out, dv.to(dv_ptr.dtype.element_ty), mask=ok)


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, C: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend_forward`'s q, k and v; o contiguous, the others with unit stride in K."""
    B, T, H, K = q.shape
    launch = attend_launch(K, q.element_size(), backward=True)
    dq, dk, dv = (torch.empty(B, T, H, K, dtype=x.dtype, device=q.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])
    options = {
        "H": H,
        "K_GROUP": H // k.shape[2],
        "V_GROUP": H // v.shape[2],
        "C": C,
        "K": K,
        "M": launch.queries,
        "N": launch.summaries,
        "K_BLOCK": max(16, triton.next_power_of_2(K)),
        "PRECISION": dot_precision(q.dtype),
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }
    _queries[(-(-T // launch.queries), B * H)](
        q, k, v, o, do, lse, delta, dq, dk, dv, T, scale, _LOG2E, *strides, **options
    )
    seen = (T - 1) // C
    if seen > 0:
        _chunks[(-(-seen // launch.summaries), B * H)](
            q, k, v, do, lse, delta, dk, dv, T, scale, _LOG2E, *strides, **options
        )
    return dq, sum_groups(dk, k.shape[2]), sum_groups(dv, v.shape[2])
