"""Window attention on the GPU: the backward kernels.

Probabilities are computed again from the saved log-sum-exp. One kernel takes blocks of rows for dq and delta, the
other blocks of keys for dk and dv, walking the rows that see them: those of the band, and behind a sink the whole
rest of its sequence. All heads of a group add to one dk and dv in registers, nothing is added atomically, and
gradients repeat bit for bit. Bounds: seven products per query and key against the forward pass's two.

Suffixes as in `triton_band.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels import fitting
from linearize.kernels.gated_scan.triton_scan import sum_groups
from linearize.kernels.window_attention.triton_band import (
    Band,
    capped,
    sequence_start,
    sink_end,
    tile,
    visible,
    whole_keys,
)


@triton.jit
def _add_dq(
    dq,
    q,
    do,
    lse,
    delta,
    k_base,
    v_base,
    first,
    limit,
    i,
    start,
    sinks_to,
    window,
    real_ptr,
    S,
    logit_scale,
    cap,
    k_t,
    v_t,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq / scale with keys first .. first + N, which end before `limit`, added."""
    j = first + tl.arange(0, N)
    key = tile(k_base, j, limit, tl.arange(0, K_BLOCK), k_t, K, WHOLE)
    value = tile(v_base, j, limit, tl.arange(0, V_BLOCK), v_t, V, WHOLE)
    s, tanh = capped(tl.dot(q, tl.trans(key), input_precision=PRECISION), logit_scale, cap, CAPPED)
    s -= lse[:, None]
    if not WHOLE:
        seen = visible(i[:, None], j[None, :], start[:, None], sinks_to[:, None], window, real_ptr, S, MASKED, SINKS)
        s = tl.where(seen & (j < limit)[None, :], s, float("-inf"))
    p = tl.exp2(s)
    ds = p * (tl.dot(do, tl.trans(value), input_precision=PRECISION) - delta[:, None])
    if CAPPED:
        ds *= 1.0 - tanh * tanh
    return tl.dot(ds.to(key.dtype), key, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["B", "T", "S", "window", "sinks", "sequence_b"])
def _queries(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    dq_ptr,
    scale,
    B,
    T,
    S,
    window,
    sinks,
    real_ptr,
    sink_ptr,
    sequence_ptr,
    sequence_b,
    logit_scale,
    cap,
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
    HAS_DLSE: tl.constexpr,
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
    SINKS: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq [B,T,H,K], and delta = Σ do·o − dlse [B,T,H]: d logit_ij = p_ij (do_i·v_j − delta_i)."""
    blocks = tl.cdiv(T * R, M)
    block = tl.program_id(0) % blocks
    group = tl.program_id(0) // blocks
    b = (group // (H // R)).to(tl.int64)
    head = group % (H // R) * R
    row = block * M + tl.arange(0, M)
    ok = row < T * R
    t = row // R
    i = t + (S - T)
    if PACKED:
        sequence_ptr += b * sequence_b
    first_i = block * M // R + (S - T)
    last_i = tl.minimum((block * M + M - 1) // R, T - 1) + (S - T)
    start = sequence_start(sequence_ptr, i, ok, PACKED)
    first_start = sequence_start(sequence_ptr, first_i, True, PACKED)
    last_start = sequence_start(sequence_ptr, last_i, True, PACKED)
    sinks_to = sink_end(sink_ptr, b, B, start, sinks, MASKED, SINKS)
    if MASKED:
        real_ptr += b * S

    h = head + row % R
    ik = tl.arange(0, K_BLOCK)
    iv = tl.arange(0, V_BLOCK)
    k_ok = ok[:, None] & (ik < K)[None, :]
    v_ok = ok[:, None] & (iv < V)[None, :]
    wide_t = t.to(tl.int64)
    place = (b * T + t) * H + h
    q = tl.load(q_ptr + b * q_b + h[:, None] * q_h + wide_t[:, None] * q_t + ik[None, :], mask=k_ok, other=0.0)
    do = tl.load(do_ptr + b * do_b + h[:, None] * do_h + wide_t[:, None] * do_t + iv[None, :], mask=v_ok, other=0.0)
    o = tl.load(o_ptr + place[:, None] * V + iv[None, :], mask=v_ok, other=0.0)
    lse = tl.load(lse_ptr + place, mask=ok, other=0.0) * 1.4426950408889634
    lse = tl.where(lse == float("-inf"), 0.0, lse)  # no key is seen
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + place, mask=ok, other=0.0)
    tl.store(delta_ptr + place, delta, mask=ok)

    k_base = k_ptr + b * k_b + head // K_GROUP * k_h
    v_base = v_ptr + b * v_b + head // V_GROUP * v_h
    dq = tl.zeros([M, K_BLOCK], tl.float32)
    low = tl.maximum(first_i - window + 1, first_start)
    if SINKS:
        from_sink = first_start
        if MASKED:
            from_sink = tl.load(sink_ptr + b)
        limit = tl.minimum(sink_end(sink_ptr, b, B, first_start, sinks, MASKED, SINKS), low)
        for first in range(from_sink, limit, N):
            dq = _add_dq(
                dq, q, do, lse, delta, k_base, v_base, first, limit, i, start, sinks_to, window, real_ptr, S,
                logit_scale, cap, k_t, v_t, K, V, N, K_BLOCK, V_BLOCK, CAPPED, MASKED, SINKS, False, PRECISION,
            )  # fmt: skip
    limit = last_i + 1
    whole_from, whole_to = whole_keys(low, first_i, last_i, last_start, window, N, MASKED)
    for first in range(low, whole_from, N):
        dq = _add_dq(
            dq, q, do, lse, delta, k_base, v_base, first, limit, i, start, sinks_to, window, real_ptr, S,
            logit_scale, cap, k_t, v_t, K, V, N, K_BLOCK, V_BLOCK, CAPPED, MASKED, SINKS, False, PRECISION,
        )  # fmt: skip
    for first in range(whole_from, whole_to, N):
        dq = _add_dq(
            dq, q, do, lse, delta, k_base, v_base, first, limit, i, start, sinks_to, window, real_ptr, S,
            logit_scale, cap, k_t, v_t, K, V, N, K_BLOCK, V_BLOCK, CAPPED, MASKED, SINKS, True, PRECISION,
        )  # fmt: skip
    for first in range(whole_to, limit, N):
        dq = _add_dq(
            dq, q, do, lse, delta, k_base, v_base, first, limit, i, start, sinks_to, window, real_ptr, S,
            logit_scale, cap, k_t, v_t, K, V, N, K_BLOCK, V_BLOCK, CAPPED, MASKED, SINKS, False, PRECISION,
        )  # fmt: skip
    tl.store(dq_ptr + place[:, None] * K + ik[None, :], (dq * scale).to(dq_ptr.dtype.element_ty), mask=k_ok)


@triton.jit
def _add_dkdv(
    dk,
    dv,
    key,
    value,
    q_base,
    do_base,
    lse_ptr,
    delta_ptr,
    above,
    j,
    b,
    B,
    T,
    S,
    window,
    sinks,
    real_ptr,
    sink_ptr,
    sequence_ptr,
    logit_scale,
    cap,
    q_t,
    q_h,
    do_t,
    do_h,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    SINKS: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk / scale and dv with rows above .. above + M added; the four pointers are the group's first head's."""
    row = above + tl.arange(0, M)
    ok = row < T * R
    t = row // R
    ik = tl.arange(0, K_BLOCK)
    iv = tl.arange(0, V_BLOCK)
    wide_t = t.to(tl.int64)
    place = wide_t * H + row % R
    q_spot = q_base + (row % R)[:, None] * q_h + wide_t[:, None] * q_t + ik[None, :]
    do_spot = do_base + (row % R)[:, None] * do_h + wide_t[:, None] * do_t + iv[None, :]
    if WHOLE:
        q = tl.load(q_spot, mask=(ik < K)[None, :], other=0.0)
        do = tl.load(do_spot, mask=(iv < V)[None, :], other=0.0)
        lse = tl.load(lse_ptr + place)
        delta = tl.load(delta_ptr + place)
    else:
        q = tl.load(q_spot, mask=ok[:, None] & (ik < K)[None, :], other=0.0)
        do = tl.load(do_spot, mask=ok[:, None] & (iv < V)[None, :], other=0.0)
        lse = tl.load(lse_ptr + place, mask=ok, other=0.0)
        delta = tl.load(delta_ptr + place, mask=ok, other=0.0)
    s, tanh = capped(tl.dot(key, tl.trans(q), input_precision=PRECISION), logit_scale, cap, CAPPED)
    lse = tl.where(lse == float("-inf"), 0.0, lse) * 1.4426950408889634
    s -= lse[None, :]
    if not WHOLE:
        i = t + (S - T)
        start = sequence_start(sequence_ptr, i, ok, PACKED)
        sinks_to = sink_end(sink_ptr, b, B, start, sinks, MASKED, SINKS)
        seen = visible(i[None, :], j[:, None], start[None, :], sinks_to[None, :], window, real_ptr, S, MASKED, SINKS)
        s = tl.where(seen & ok[None, :], s, float("-inf"))
    p = tl.exp2(s)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    ds = p * (tl.dot(value, tl.trans(do), input_precision=PRECISION) - delta[None, :])
    if CAPPED:
        ds *= 1.0 - tanh * tanh
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["B", "T", "S", "window", "sinks", "sequence_b"])
def _keys(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    scale,
    B,
    T,
    S,
    window,
    sinks,
    real_ptr,
    sink_ptr,
    sequence_ptr,
    sequence_b,
    logit_scale,
    cap,
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
    SINKS: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk [B,S,H/R,K] and dv [B,S,H/R,V] of a block of keys, summed over the group's heads."""
    blocks = tl.cdiv(S, N)
    first = tl.program_id(0) % blocks * N
    group = tl.program_id(0) // blocks
    b = (group // (H // R)).to(tl.int64)
    head = group % (H // R) * R
    j = first + tl.arange(0, N)
    exists = j < S
    stop = tl.zeros([N], tl.int32) + S
    if PACKED:
        sequence_ptr += b * sequence_b
        stop = tl.load(sequence_ptr + S + j, mask=exists, other=0)
    reach = tl.minimum(j + window, stop)  # the first position that does not see the key
    if SINKS:
        key_start = sequence_start(sequence_ptr, j, exists, PACKED) * (1 if PACKED else 0)
        reach = tl.where(j < sink_end(sink_ptr, b, B, key_start, sinks, MASKED, SINKS), stop, reach)
    end = tl.max(tl.where(exists, reach, 0))
    if MASKED:
        real_ptr += b * S

    ik = tl.arange(0, K_BLOCK)
    iv = tl.arange(0, V_BLOCK)
    key = tile(k_ptr + b * k_b + head // K_GROUP * k_h, j, S, ik, k_t, K, False)
    value = tile(v_ptr + b * v_b + head // V_GROUP * v_h, j, S, iv, v_t, V, False)
    dk = tl.zeros([N, K_BLOCK], tl.float32)
    dv = tl.zeros([N, V_BLOCK], tl.float32)
    q_base = q_ptr + b * q_b + head * q_h
    do_base = do_ptr + b * do_b + head * do_h
    lse_ptr += b * T * H + head
    delta_ptr += b * T * H + head

    low = tl.maximum(first - (S - T), 0) * R
    limit = (end - (S - T)) * R
    whole_from = limit
    whole_to = limit
    if not MASKED:  # positions that see every key of the block: from its last on, while the first is in reach
        last_seen = tl.minimum(first + window, S)
        if PACKED:
            last_seen = tl.minimum(last_seen, tl.load(sequence_ptr + S + first))
        seen_from = tl.maximum(first + N - 1 - (S - T), 0) * R
        whole_from = tl.minimum(low + tl.cdiv(tl.maximum(seen_from - low, 0), M) * M, limit)
        whole_to = whole_from + tl.maximum((last_seen - (S - T)) * R - whole_from, 0) // M * M
    for above in range(low, whole_from, M):
        dk, dv = _add_dkdv(
            dk, dv, key, value, q_base, do_base, lse_ptr, delta_ptr, above, j, b, B, T, S, window, sinks, real_ptr,
            sink_ptr, sequence_ptr, logit_scale, cap, q_t, q_h, do_t, do_h, H, R, K, V, M, K_BLOCK, V_BLOCK, CAPPED,
            MASKED, SINKS, PACKED, False, PRECISION,
        )  # fmt: skip
    for above in range(whole_from, whole_to, M):
        dk, dv = _add_dkdv(
            dk, dv, key, value, q_base, do_base, lse_ptr, delta_ptr, above, j, b, B, T, S, window, sinks, real_ptr,
            sink_ptr, sequence_ptr, logit_scale, cap, q_t, q_h, do_t, do_h, H, R, K, V, M, K_BLOCK, V_BLOCK, CAPPED,
            MASKED, SINKS, PACKED, True, PRECISION,
        )  # fmt: skip
    for above in range(whole_to, limit, M):
        dk, dv = _add_dkdv(
            dk, dv, key, value, q_base, do_base, lse_ptr, delta_ptr, above, j, b, B, T, S, window, sinks, real_ptr,
            sink_ptr, sequence_ptr, logit_scale, cap, q_t, q_h, do_t, do_h, H, R, K, V, M, K_BLOCK, V_BLOCK, CAPPED,
            MASKED, SINKS, PACKED, False, PRECISION,
        )  # fmt: skip

    out = ((b * S + j) * (H // R) + group % (H // R))[:, None]
    dk = (dk * scale).to(dk_ptr.dtype.element_ty)
    tl.store(dk_ptr + out * K + ik[None, :], dk, mask=exists[:, None] & (ik < K)[None, :])
    dv = dv.to(dv_ptr.dtype.element_ty)
    tl.store(dv_ptr + out * V + iv[None, :], dv, mask=exists[:, None] & (iv < V)[None, :])


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    scale: float,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `forward`'s q, k and v, and delta [B,T,H] = Σ do·o − dlse; o, lse and dlse contiguous, the others with
    unit stride in the last."""
    B, T, H, K = q.shape
    S, V = k.shape[1], v.shape[3]
    options = band.options(q, k, v, "queries")
    groups = H // options["R"]
    dq, delta = torch.empty(B, T, H, K, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    dk = torch.empty(B, S, groups, K, dtype=k.dtype, device=k.device)
    dv = torch.empty(B, S, groups, V, dtype=v.dtype, device=v.device)
    arguments = band.arguments(q, k, scale)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])
    programs = B * groups * triton.cdiv(T * options["R"], options["M"])
    queries = (q, k, v, o, do, lse, dlse, delta, dq, scale)
    fitting.launch(_queries, (programs,), *queries, *arguments, *strides, HAS_DLSE=dlse is not None, **options)
    options = band.options(q, k, v, "keys")
    keys = (q, k, v, do, lse, delta, dk, dv, scale)
    fitting.launch(_keys, (B * groups * triton.cdiv(S, options["N"]),), *keys, *arguments, *strides, **options)
    return dq, sum_groups(dk, k.shape[2]), sum_groups(dv, v.shape[2]), delta
