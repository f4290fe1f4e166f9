"""One token of RAT attention on the GPU: gates, running pair, rotation and attention over the slots in one launch.

A program takes one running pair and its slots, or a part of them where there are few pairs; a second, small launch
then joins the parts. Every row of a tile keeps a softmax of its own until the end, so the loop crosses no threads but
for the scores. How many slots a row has is read on the device: nothing waits, and a CUDA graph can be replayed.

Bound: the keys and values of the finished chunks, 4·K·(t/C) bytes per pair in 16 bits, read once.

Suffixes as in `triton_own.py`; N slots in a tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.rat_attention import launch as table
from linearize.kernels.rat_attention.triton_own import partners

_LOG2E = 1.4426950408889634


@triton.jit
def _step(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    running_k_ptr,
    running_v_ptr,
    slot_k_ptr,
    slot_v_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    o_ptr,
    part_ptr,
    scale,
    q_b,
    q_h,
    k_b,
    k_h,
    v_b,
    v_h,
    g_b,
    g_h,
    sk_b,
    sk_h,
    sk_n,
    sv_b,
    sv_h,
    sv_n,
    H: tl.constexpr,
    G: tl.constexpr,
    Q_GROUP: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    G_GROUP: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    K_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """o [B,H,K], or with several PARTS the weighted sum, maximum and total [B,H,PARTS,K+2] of each."""
    bg = tl.program_id(0)
    part = tl.program_id(1)
    b = (bg // G).to(tl.int64)
    g_head = bg % G
    i = tl.arange(0, K_BLOCK)
    ok = i < K
    half: tl.constexpr = WIDTH // 2
    partner = partners(i, half)
    paired = i < WIDTH
    sign = tl.where(i < half, -1.0, 1.0)
    position = tl.load(position_ptr + b)
    chunk = (position // C).to(tl.int32)
    place = position % C
    if WIDTH > 0:
        cos = tl.load(cos_ptr + chunk * WIDTH + i, mask=paired, other=1.0)
        sin = sign * tl.load(sin_ptr + chunk * WIDTH + i, mask=paired, other=0.0)

    # The running pair; the key's other channel of each pair is computed along, to turn it.
    k_base = k_ptr + b * k_b + (g_head // K_GROUP) * k_h
    g_base = g_ptr + b * g_b + (g_head // G_GROUP) * g_h
    at = bg.to(tl.int64) * K
    keep = tl.where(place == 0, 0.0, 1.0)
    gate = tl.load(g_base + i, mask=ok, other=0.0).to(tl.float32)
    if LOGITS:
        gate = tl.sigmoid(gate)
    k = tl.load(k_base + i, mask=ok, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + b * v_b + (g_head // V_GROUP) * v_h + i, mask=ok, other=0.0).to(tl.float32)
    # A reset drops the old pair, whatever it holds.
    old_k = tl.where(keep > 0.0, tl.load(running_k_ptr + at + i, mask=ok, other=0.0), 0.0)
    old_v = tl.where(keep > 0.0, tl.load(running_v_ptr + at + i, mask=ok, other=0.0), 0.0)
    own_k = gate * old_k + (1.0 - gate) * k
    own_v = gate * old_v + (1.0 - gate) * v
    turned_k = own_k
    if WIDTH > 0:
        gate_p = tl.load(g_base + partner, mask=paired, other=0.0).to(tl.float32)
        if LOGITS:
            gate_p = tl.sigmoid(gate_p)
        k_p = tl.load(k_base + partner, mask=paired, other=0.0).to(tl.float32)
        old_p = tl.where(keep > 0.0, tl.load(running_k_ptr + at + partner, mask=paired, other=0.0), 0.0)
        turned_k = own_k * cos + tl.where(paired, gate_p * old_p + (1.0 - gate_p) * k_p, 0.0) * sin
    tl.debug_barrier()  # all have read the old pair
    slot_k = slot_k_ptr + b * sk_b + g_head * sk_h
    slot_v = slot_v_ptr + b * sv_b + g_head * sv_h
    first = ok & (part + i * 0 == 0)
    tl.store(running_k_ptr + at + i, own_k, mask=first)
    tl.store(running_v_ptr + at + i, own_v, mask=first)
    done = first & (place + i * 0 == C - 1)
    spot = chunk.to(tl.int64)
    tl.store(slot_k + spot * sk_n + i, turned_k.to(slot_k_ptr.dtype.element_ty), mask=done)
    tl.store(slot_v + spot * sv_n + i, own_v.to(slot_v_ptr.dtype.element_ty), mask=done)

    size = (chunk + N * PARTS - 1) // (N * PARTS) * N
    begin = part * size
    end = tl.minimum(begin + size, chunk)
    for r in range(0, H // G):
        h = g_head * (H // G) + r
        q_base = q_ptr + b * q_b + (h // Q_GROUP) * q_h
        q = tl.load(q_base + i, mask=ok, other=0.0).to(tl.float32)
        if WIDTH > 0:
            q = q * cos + tl.load(q_base + partner, mask=paired, other=0.0).to(tl.float32) * sin
        q = q * scale
        top = tl.full([N], -1e30, tl.float32)
        total = tl.zeros([N], tl.float32)
        acc = tl.zeros([N, K_BLOCK], tl.float32)
        for start in range(begin, end, N):
            n = start + tl.arange(0, N)
            row = n.to(tl.int64)[:, None]
            here = (n < end)[:, None] & ok[None, :]
            key = tl.load(slot_k + row * sk_n + i[None, :], mask=here, other=0.0).to(tl.float32)
            value = tl.load(slot_v + row * sv_n + i[None, :], mask=here, other=0.0).to(tl.float32)
            s = tl.where(n < end, tl.sum(key * q[None, :], 1), float("-inf"))
            highest = tl.maximum(top, s)
            shrink = tl.exp2(top - highest)
            p = tl.exp2(s - highest)
            total = total * shrink + p
            acc = acc * shrink[:, None] + p[:, None] * value
            top = highest
        highest = tl.max(top, 0)
        own = tl.where(part == 0, tl.sum(q * turned_k, 0), -1e30)
        whole = tl.maximum(highest, own)
        weight = tl.exp2(top - whole)
        p_own = tl.where(part == 0, tl.exp2(own - whole), 0.0)
        sums = tl.sum(total * weight, 0) + p_own
        o = tl.sum(acc * weight[:, None], 0) + p_own * own_v
        if PARTS == 1:
            tl.store(o_ptr + (b * H + h) * K + i, (o / sums).to(o_ptr.dtype.element_ty), mask=ok)
        else:
            out = part_ptr + ((b * H + h) * PARTS + part) * (K + 2)
            tl.store(out + i, o, mask=ok)
            tl.store(out + K, whole)
            tl.store(out + K + 1, sums)


@triton.jit
def _merge(part_ptr, o_ptr, K: tl.constexpr, K_BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The parts [.., PARTS, K+2] of one query head joined: o [.., K]."""
    head = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, K_BLOCK)
    p = tl.arange(0, PARTS)
    base = part_ptr + (head * PARTS + p) * (K + 2)
    top = tl.load(base + K)
    weight = tl.exp2(top - tl.max(top, 0))
    acc = tl.load(base[:, None] + i[None, :], mask=(i < K)[None, :], other=0.0)
    o = tl.sum(acc * weight[:, None], 0) / tl.sum(tl.load(base + K + 1) * weight, 0)
    tl.store(o_ptr + head * K + i, o.to(o_ptr.dtype.element_ty), mask=i < K)


@torch.library.custom_op(
    "linearize::rat_attention_step",
    mutates_args=("running_key", "running_value", "keys", "values"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor(a!) running_key, Tensor(b!) running_value, "
    "Tensor(c!) keys, Tensor(d!) values, Tensor position, Tensor? cos, Tensor? sin, int chunk, float scale, "
    "bool logits) -> Tensor",
)
def _step_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    running_key: Tensor,
    running_value: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    chunk: int,
    scale: float,
    logits: bool,
) -> Tensor:
    return _launch(q, k, v, gate, running_key, running_value, keys, values, position, cos, sin, chunk, scale, logits)


@_step_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *_: object) -> Tensor:
    return v.new_empty(v.shape[0], max(x.shape[1] for x in (q, k, v, gate)), v.shape[2])


def step(
    token: tuple[Tensor, Tensor, Tensor, Tensor],
    running: tuple[Tensor, Tensor],
    slots: tuple[Tensor, Tensor],
    position: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    chunk: int,
    scale: float,
    *,
    logits: bool,
) -> Tensor:
    """q, k, v, gate [B,heads,K]; running pair [B,G,K] float32 contiguous and slots [B,G,S,K], updated in place.

    `position` [B] stays as it is. A custom operator only to torch.compile.
    """
    run: Any = _step_op if torch.compiler.is_compiling() else _launch
    return run(*token, *running, *slots, position, *(tables or (None, None)), chunk, scale, logits)


def _parts(pairs: int, slots: int, rows: int) -> int:
    """Into how many parts the slots of each pair are cut: a power of two."""
    parts = 1
    while 2 * parts * pairs <= table.STEP_PROGRAMS and 2 * parts * rows <= slots and parts < 64:
        parts *= 2
    return parts


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    running_key: Tensor,
    running_value: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    chunk: int,
    scale: float,
    logits: bool,
) -> Tensor:
    token = [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (q, k, v, gate)]
    (B, G, K), H = running_key.shape, max(x.shape[1] for x in token)
    o = v.new_empty(B, H, K)
    if o.numel() == 0:
        return o
    pick, block = table.TABLE["step"], max(16, triton.next_power_of_2(K))
    parts = _parts(B * G, keys.shape[2], pick.rows)
    partial = running_key.new_empty(B, H, parts, K + 2) if parts > 1 else None
    with on_device(q):
        _step[(B * G, parts)](
            *token, running_key, running_value, keys, values, cos, sin, position, o, partial, scale * _LOG2E,
            *(s for x in token for s in x.stride()[:2]), *keys.stride()[:3], *values.stride()[:3],
            H=H, G=G, Q_GROUP=H // q.shape[1], K_GROUP=G // k.shape[1], V_GROUP=G // v.shape[1],
            G_GROUP=G // gate.shape[1], C=chunk, K=K, WIDTH=0 if cos is None else cos.shape[1], N=pick.rows,
            K_BLOCK=block, PARTS=parts, LOGITS=logits, num_warps=pick.warps,
        )  # fmt: skip
        if parts > 1:
            _merge[(B * H,)](partial, o, K=K, K_BLOCK=block, PARTS=parts, num_warps=4)
    return o
