"""The gated scan on the GPU: Triton kernels of both directions and how they are launched.

A program takes a tile of segments and channels through the steps of a segment, side by side, with the state in
registers: every element is read and written once, in rows of channels. Where chunks are short a segment is a
chunk, and that is all. Longer chunks, and a scan without them, are cut into segments near the square root of
T: a first pass finds what each segment adds to a state and how much of it it keeps, `_join` carries the
states over them, and the second pass starts from those.

Bounds: the forward pass moves x, gate and y once and does 3 operations per element; the backward pass moves
x, gate, y, dy, dx and dgate once. Both are bound by memory bandwidth. Segments add another read of the
inputs.

Suffixes: B batch, T time, H heads, D channels, N segments. Heads of x and gate may each be fewer than H;
consecutive ones share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.gated_scan.launch import TABLE

MAX_DIRECT = 64  # chunks up to this length are one segment


@triton.jit(do_not_specialize=["T", "lead", "segments"])
def _forward(
    x_ptr,
    g_ptr,
    y_ptr,
    start_ptr,
    end_ptr,
    product_ptr,
    lead_ptr,
    T,
    lead,
    segments,
    x_b,
    x_t,
    x_h,
    g_b,
    g_t,
    g_h,
    H: tl.constexpr,
    X_GROUP: tl.constexpr,
    G_GROUP: tl.constexpr,
    D: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    START: tl.constexpr,
    END: tl.constexpr,
    SUMMARY: tl.constexpr,
    LEADS: tl.constexpr,
):
    """y of a tile of segments, each from zero unless START: 1 the first from `start` [B,H,D], 2 every one
    from its own [B,H,N,D]. END: store the last one's state [B,H,D]. SUMMARY: store no y but the state
    [B,H,N,D] that each segment ends with and the product of its gates. LEADS: row b's first step stands at lead[b] in
    its chunk, and `segments` are enough for every row."""
    tiles = tl.cdiv(segments, ROWS)
    h = tl.program_id(0) % H  # heads side by side: what they share, and rows of memory, are read together
    segment = tl.program_id(0) // H % tiles * ROWS + tl.arange(0, ROWS)
    b = (tl.program_id(0) // H // tiles).to(tl.int64)
    if LEADS:
        lead = tl.load(lead_ptr + b)
    bh = b * H + h
    d = tl.program_id(1) * D_BLOCK + tl.arange(0, D_BLOCK)
    d_ok = d < D
    here = (segment < segments)[:, None] & d_ok[None, :]
    spot = (bh.to(tl.int64) * segments + segment.to(tl.int64))[:, None] * D + d[None, :]
    x_base = x_ptr + b * x_b + (h // X_GROUP) * x_h + d[None, :]
    g_base = g_ptr + b * g_b + (h // G_GROUP) * g_h + d[None, :]
    y_base = y_ptr + (b * T * H + h) * D + d[None, :]
    state = tl.zeros([ROWS, D_BLOCK], tl.float32)
    if START == 1:
        row = tl.load(start_ptr + bh.to(tl.int64) * D + d, mask=d_ok, other=0.0)
        state = tl.where((segment == 0)[:, None], row[None, :], state)
    if START == 2:
        state = tl.load(start_ptr + spot, mask=here, other=0.0)
    if SUMMARY:
        product = tl.full([ROWS, D_BLOCK], 1.0, tl.float32)
    for i in range(0, STEPS):
        t = (segment * STEPS + i - lead).to(tl.int64)
        ok = ((t >= 0) & (t < T))[:, None] & d_ok[None, :]
        x = tl.load(x_base + t[:, None] * x_t, mask=ok, other=0.0).to(tl.float32)
        g = tl.load(g_base + t[:, None] * g_t, mask=ok, other=1.0).to(tl.float32)
        state = g * state + (1.0 - g) * x  # outside, the gate is 1
        if SUMMARY:
            product *= g
        else:
            tl.store(y_base + t[:, None] * (H * D), state.to(y_ptr.dtype.element_ty), mask=ok)
    if SUMMARY:
        tl.store(end_ptr + spot, state, mask=here)
        tl.store(product_ptr + spot, product, mask=here)
    if END:
        last = (segment == (T + lead - 1) // STEPS)[:, None] & d_ok[None, :]
        tl.store(end_ptr + bh.to(tl.int64) * D + d[None, :] + segment[:, None] * 0, state, mask=last)


@triton.jit(do_not_specialize=["T", "lead", "segments", "chunk"])
def _backward(
    x_ptr,
    g_ptr,
    y_ptr,
    dy_ptr,
    start_ptr,
    carry_ptr,
    dx_ptr,
    dg_ptr,
    dstart_ptr,
    product_ptr,
    lead_ptr,
    T,
    lead,
    segments,
    chunk,
    x_b,
    x_t,
    x_h,
    g_b,
    g_t,
    g_h,
    dy_b,
    dy_t,
    dy_h,
    H: tl.constexpr,
    X_GROUP: tl.constexpr,
    G_GROUP: tl.constexpr,
    D: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    START: tl.constexpr,
    CARRY: tl.constexpr,
    DSTART: tl.constexpr,
    SUMMARY: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Backwards through a tile of segments: e_t = dy_t + g_{t+1} e_{t+1}, dx = (1 − g) e, dg = e (y_{t-1} − x).

    CARRY: the gradient that comes into a segment from behind it: 0 none, 1 [B,H,D] into the last, 2 [B,H,N,D]
    into each. START: the scan had a start state [B,H,D]; DSTART: store its gradient. SUMMARY: store only the
    gradient that leaves each segment, at `carry_ptr`, and the product of its gates. `chunk` is 0 without
    resets.
    """
    tiles = tl.cdiv(segments, ROWS)
    h = tl.program_id(0) % H  # heads side by side: what they share, and rows of memory, are read together
    segment = tl.program_id(0) // H % tiles * ROWS + tl.arange(0, ROWS)
    b = (tl.program_id(0) // H // tiles).to(tl.int64)
    if LEADS:
        lead = tl.load(lead_ptr + b)
    bh = b * H + h
    d = tl.program_id(1) * D_BLOCK + tl.arange(0, D_BLOCK)
    d_ok = d < D
    here = (segment < segments)[:, None] & d_ok[None, :]
    spot = (bh.to(tl.int64) * segments + segment.to(tl.int64))[:, None] * D + d[None, :]
    row_spot = bh.to(tl.int64) * D + d
    x_base = x_ptr + b * x_b + (h // X_GROUP) * x_h + d[None, :]
    g_base = g_ptr + b * g_b + (h // G_GROUP) * g_h + d[None, :]
    dy_base = dy_ptr + b * dy_b + h * dy_h + d[None, :]
    base = (b * T * H + h) * D + d[None, :]
    carry = tl.zeros([ROWS, D_BLOCK], tl.float32)
    if CARRY == 1:
        row = tl.load(carry_ptr + row_spot, mask=d_ok, other=0.0)
        carry = tl.where((segment == segments - 1)[:, None], row[None, :], carry)
    if CARRY == 2:
        carry = tl.load(carry_ptr + spot, mask=here, other=0.0)
    if SUMMARY:
        product = tl.full([ROWS, D_BLOCK], 1.0, tl.float32)
    for i in range(0, STEPS):
        u = segment * STEPS + (STEPS - 1 - i)
        t = (u - lead).to(tl.int64)
        ok = ((t >= 0) & (t < T))[:, None] & d_ok[None, :]
        dy = tl.load(dy_base + t[:, None] * dy_t, mask=ok, other=0.0).to(tl.float32)
        g = tl.load(g_base + t[:, None] * g_t, mask=ok, other=1.0).to(tl.float32)
        e = dy + carry
        carry = g * e
        if SUMMARY:
            product *= g
        else:
            x = tl.load(x_base + t[:, None] * x_t, mask=ok, other=0.0).to(tl.float32)
            resets = (chunk > 0) & (u % tl.maximum(chunk, 1) == 0)
            earlier = ok & ((t > 0) & (resets == 0))[:, None]
            at = base + t[:, None] * (H * D)
            before = tl.load(y_ptr + at - H * D, mask=earlier, other=0.0).to(tl.float32)
            if START:
                row = tl.load(start_ptr + row_spot, mask=d_ok, other=0.0)
                before = tl.where(((t == 0) & (resets == 0))[:, None], row[None, :], before)
            tl.store(dx_ptr + at, ((1.0 - g) * e).to(dx_ptr.dtype.element_ty), mask=ok)
            tl.store(dg_ptr + at, ((before - x) * e).to(dg_ptr.dtype.element_ty), mask=ok)
    if SUMMARY:
        tl.store(carry_ptr + spot, carry, mask=here)
        tl.store(product_ptr + spot, product, mask=here)
    if DSTART:
        first = (segment == 0)[:, None] & d_ok[None, :]
        tl.store(dstart_ptr + row_spot[None, :] + segment[:, None] * 0, carry, mask=first)


@triton.jit(do_not_specialize=["segments", "per_chunk"])
def _join(
    gained_ptr,
    product_ptr,
    start_ptr,
    segments,
    per_chunk,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    START: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Turn what segments [B,H,N,D] gain, each from zero, into the states that they start from, in place."""
    bh = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * D_BLOCK + tl.arange(0, D_BLOCK)
    ok = d < D
    state = tl.zeros([D_BLOCK], tl.float32)
    if START:
        state = tl.load(start_ptr + bh * D + d, mask=ok, other=0.0)
    for i in range(0, segments):
        if REVERSE:
            n = segments - 1 - i
            boundary = n + 1
        else:
            n = i
            boundary = n
        resets = (i > 0) & (per_chunk > 0) & (boundary % tl.maximum(per_chunk, 1) == 0)
        state = tl.where(resets, 0.0, state)
        at = (bh * segments + n) * D + d
        gained = tl.load(gained_ptr + at, mask=ok, other=0.0)
        product = tl.load(product_ptr + at, mask=ok, other=0.0)
        tl.store(gained_ptr + at, state, mask=ok)
        state = product * state + gained


@dataclass(frozen=True)
class _Plan:
    """How a scan is cut: segment length and number, segments per chunk (0: no chunks), the launch."""

    steps: int
    segments: int
    per_chunk: int
    rows: int
    d_block: int
    warps: int

    @property
    def alone(self) -> bool:
        """Whether no state passes from segment to segment."""
        return self.per_chunk == 1 or self.segments == 1

    def grid(self, BH: int, D: int) -> tuple[int, int]:
        return (-(-self.segments // self.rows) * BH, -(-D // self.d_block))


def plan(kernel: str, T: int, D: int, chunk: int, lead: int | Tensor) -> _Plan:
    steps = min(512, max(32, 1 << ((T - 1).bit_length() + 1) // 2))
    if chunk > 0:
        steps = chunk if chunk <= MAX_DIRECT else min(chunk, steps)
    segments = -(-(T + (chunk - 1 if isinstance(lead, Tensor) else lead)) // steps)
    d_block = min(128, triton.next_power_of_2(D))
    pick = TABLE[kernel]
    rows = max(1, min(pick.elements // d_block, triton.next_power_of_2(segments)))
    return _Plan(steps, segments, chunk // steps if chunk > 0 else 0, rows, d_block, pick.warps)


def scan_forward(
    x: Tensor, g: Tensor, start: Tensor | None, chunk: int, lead: int | Tensor, want_end: bool
) -> tuple[Tensor, Tensor | None]:
    """y [B,T,H,D] in x's dtype and the last state [B,H,D]; x and g have unit stride in the last dimension.

    lead: where in its chunk the first step stands, of each row if [B] int32.
    """
    H = max(x.shape[2], g.shape[2])
    B, T, _, D = x.shape
    p = plan("forward", T, D, chunk, lead)
    y = torch.empty(B, T, H, D, dtype=x.dtype, device=x.device)
    end = torch.empty(B, H, D, dtype=torch.float32, device=x.device) if want_end else None
    leads, lead = (lead, 0) if isinstance(lead, Tensor) else (None, lead)
    shared = (leads, T, lead, p.segments, *x.stride()[:3], *g.stride()[:3])
    options = {
        "H": H,
        "X_GROUP": H // x.shape[2],
        "G_GROUP": H // g.shape[2],
        "D": D,
        "STEPS": p.steps,
        "ROWS": p.rows,
        "D_BLOCK": p.d_block,
        "num_warps": p.warps,
        "LEADS": leads is not None,
    }
    grid, states, mode = p.grid(B * H, D), start, 0 if start is None else 1
    if not p.alone:
        states, product = torch.empty(2, B, H, p.segments, D, dtype=torch.float32, device=x.device)
        _forward[grid](x, g, y, None, states, product, *shared, **options, START=0, END=False, SUMMARY=True)
        _join[(B * H, grid[1])](
            states,
            product,
            start,
            p.segments,
            p.per_chunk,
            D=D,
            D_BLOCK=p.d_block,
            START=start is not None,
            REVERSE=False,
            num_warps=1,
        )
        mode = 2
    _forward[grid](x, g, y, states, end, None, *shared, **options, START=mode, END=want_end, SUMMARY=False)
    return y, end


def scan_backward(
    x: Tensor,
    g: Tensor,
    y: Tensor,
    start: Tensor | None,
    dy: Tensor,
    dend: Tensor | None,
    chunk: int,
    lead: int | Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dg of the inputs' shapes and dstart [B,H,D]; y contiguous, dy with unit stride in the last dimension."""
    B, T, H, D = y.shape
    p = plan("backward", T, D, chunk, lead)
    dx = torch.empty(y.shape, dtype=x.dtype, device=x.device)
    dg = torch.empty(y.shape, dtype=g.dtype, device=x.device)
    dstart = None if start is None else torch.empty_like(start)
    leads, lead = (lead, 0) if isinstance(lead, Tensor) else (None, lead)
    if leads is not None and dend is not None:  # the last step may stand in different segments
        dy = dy.clone(memory_format=torch.contiguous_format)
        dy[:, -1] += dend
        dend = None
    tensors = (x, g, y, dy, start)
    shared = (leads, T, lead, p.segments, chunk, *x.stride()[:3], *g.stride()[:3], *dy.stride()[:3])
    options = {
        "H": H,
        "X_GROUP": H // x.shape[2],
        "G_GROUP": H // g.shape[2],
        "D": D,
        "STEPS": p.steps,
        "ROWS": p.rows,
        "D_BLOCK": p.d_block,
        "num_warps": p.warps,
        "START": start is not None,
        "LEADS": leads is not None,
    }
    grid, carry, mode = p.grid(B * H, D), dend, 0 if dend is None else 1
    if not p.alone:
        carry, product = torch.empty(2, B, H, p.segments, D, dtype=torch.float32, device=x.device)
        _backward[grid](*tensors, carry, dx, dg, None, product, *shared, **options, CARRY=0, DSTART=False, SUMMARY=True)
        _join[(B * H, grid[1])](
            carry,
            product,
            dend,
            p.segments,
            p.per_chunk,
            D=D,
            D_BLOCK=p.d_block,
            START=dend is not None,
            REVERSE=True,
            num_warps=1,
        )
        mode = 2
    _backward[grid](
        *tensors,
        carry,
        dx,
        dg,
        dstart,
        None,
        *shared,
        **options,
        CARRY=mode,
        DSTART=dstart is not None,
        SUMMARY=False,
    )
    return sum_groups(dx, x.shape[2]), sum_groups(dg, g.shape[2]), dstart


def sum_groups(d_BTHD: Tensor, heads: int) -> Tensor:
    """Gradients of heads that share one, summed in float32: [B,T,heads,D]."""
    B, T, H, D = d_BTHD.shape
    if heads == H:
        return d_BTHD
    return d_BTHD.view(B, T, heads, H // heads, D).sum(3, dtype=torch.float32).to(d_BTHD.dtype)
