"""The short convolution on the GPU, forward and backward; each kernel reads a tensor once from memory.

The forward pass is a sum of W shifted rows, so every input meets W outputs while it lies in the L1 cache. The
backward pass makes the sums again from x instead of saving them. Its first kernel finds the sums' gradients dz and,
from them, those of the weights, summed in registers over a program's rows and then over programs, without atomics; the
second spreads dz over the inputs, if anyone asks for their gradient. (Finding dz again for each of the W outputs of an
input instead of storing it took five times as long.) Bounds: 2 bytes read and 2 written per 16-bit element forward;
backward 4 read, 2 written, and with an activation dz between, 2 written and 2 read.

Suffixes: B batch, T time, D channels, W taps, N sequences. The state of a sequence holds the W − 1 inputs before its
first token, oldest first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a tile
TILES = 16  # a backward program's tiles along time
WARPS = 2


@triton.jit
def _inputs(x_ptr, start_ptr, t, t_ok, offset, first, state_row, d, d_ok, x_t, x_d, W: tl.constexpr,
            D: tl.constexpr, HAS_STATE: tl.constexpr):  # fmt: skip
    """Rows t + offset of x, of the state before `first`, where the rows' sequences begin: [ROWS, D_BLOCK] float32."""
    s = t + offset
    inside = t_ok & (s >= first)
    spot = x_ptr + s.to(tl.int64)[:, None] * x_t + d[None, :] * x_d
    x = tl.load(spot, mask=inside[:, None] & d_ok[None, :], other=0.0).to(tl.float32)
    if HAS_STATE:
        lag = s - first + (W - 1)
        before = t_ok & (s < first) & (lag >= 0)
        spot = start_ptr + (state_row * (W - 1) + lag)[:, None] * D + d[None, :]
        x += tl.load(spot, mask=before[:, None] & d_ok[None, :], other=0.0)
    return x


@triton.jit
def _sequence(t, t_ok, b, T, first_ptr, index_ptr, PACKED: tl.constexpr):
    """First and last-plus-one position of the rows' sequences, and their row of the state."""
    if PACKED:
        index = tl.load(index_ptr + t, mask=t_ok, other=0)
        first = tl.load(first_ptr + index, mask=t_ok, other=0)
        stop = tl.load(first_ptr + index + 1, mask=t_ok, other=0)
        return first, stop, index.to(tl.int64)
    return t * 0, t * 0 + T, b + t * 0


@triton.jit(do_not_specialize=["T"])
def _forward(
    x_ptr,
    w_ptr,
    bias_ptr,
    start_ptr,
    first_ptr,
    index_ptr,
    y_ptr,
    T,
    x_b,
    x_t,
    x_d,
    D: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
):
    d_blocks: tl.constexpr = (D + D_BLOCK - 1) // D_BLOCK
    d = tl.program_id(0) % d_blocks * D_BLOCK + tl.arange(0, D_BLOCK)
    tiles = tl.cdiv(T, ROWS)
    t = tl.program_id(0) // d_blocks % tiles * ROWS + tl.arange(0, ROWS)
    b = (tl.program_id(0) // d_blocks // tiles).to(tl.int64)
    t_ok = t < T
    d_ok = d < D
    x_ptr += b * x_b
    first, _stop, state_row = _sequence(t, t_ok, b, T, first_ptr, index_ptr, PACKED)
    z = tl.zeros([ROWS, D_BLOCK], tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + d, mask=d_ok, other=0.0)[None, :]
    for i in tl.static_range(W):
        w = tl.load(w_ptr + d * W + i, mask=d_ok, other=0.0)
        x = _inputs(x_ptr, start_ptr, t, t_ok, i - W + 1, first, state_row, d, d_ok, x_t, x_d, W, D, HAS_STATE)
        z += w[None, :] * x
    if SILU:
        z = z * tl.sigmoid(z)
    spot = y_ptr + (b * T + t)[:, None] * D + d[None, :]
    tl.store(spot, z.to(y_ptr.dtype.element_ty), mask=t_ok[:, None] & d_ok[None, :])


@triton.jit
def _slope(x_ptr, w_ptr, bias_ptr, start_ptr, dy_ptr, t, t_ok, first, state_row, d, d_ok, x_t, x_d, dy_t, dy_d,
           W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, D_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
           SILU: tl.constexpr, HAS_STATE: tl.constexpr):  # fmt: skip
    """dz of rows t: dy times the activation's slope, zeros where not t_ok."""
    spot = dy_ptr + t.to(tl.int64)[:, None] * dy_t + d[None, :] * dy_d
    dz = tl.load(spot, mask=t_ok[:, None] & d_ok[None, :], other=0.0).to(tl.float32)
    if SILU:
        z = tl.zeros([ROWS, D_BLOCK], tl.float32)
        if HAS_BIAS:
            z += tl.load(bias_ptr + d, mask=d_ok, other=0.0)[None, :]
        for i in tl.static_range(W):
            w = tl.load(w_ptr + d * W + i, mask=d_ok, other=0.0)
            x = _inputs(x_ptr, start_ptr, t, t_ok, i - W + 1, first, state_row, d, d_ok, x_t, x_d, W, D, HAS_STATE)
            z += w[None, :] * x
        gate = tl.sigmoid(z)
        dz *= gate * (1.0 + z * (1.0 - gate))
    return dz


@triton.jit
def _place(dw, tap, i: tl.constexpr, rows):
    """dw with the sum of the rows in tap i."""
    return dw + tl.where((tap == i)[:, None], tl.sum(rows, 0)[None, :], 0.0)


@triton.jit(do_not_specialize=["T"])
def _backward(
    x_ptr,
    w_ptr,
    bias_ptr,
    start_ptr,
    first_ptr,
    index_ptr,
    dy_ptr,
    dz_ptr,
    dw_ptr,
    T,
    x_b,
    x_t,
    x_d,
    dy_b,
    dy_t,
    dy_d,
    D: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    STORE: tl.constexpr,
):
    """dz if STORE, and the program's part of the gradients of the weight and, as tap W, of the bias: [programs, TAPS, D]."""
    d_blocks: tl.constexpr = (D + D_BLOCK - 1) // D_BLOCK
    d = tl.program_id(0) % d_blocks * D_BLOCK + tl.arange(0, D_BLOCK)
    part = tl.program_id(0) // d_blocks
    parts = tl.cdiv(T, ROWS * TILES)
    b = (part // parts).to(tl.int64)
    d_ok = d < D
    x_ptr += b * x_b
    dy_ptr += b * dy_b
    tap = tl.arange(0, TAPS)
    dw = tl.zeros([TAPS, D_BLOCK], tl.float32)
    # Of the first four taps and the bias, summed over the rows once, at the end: a sum over threads costs more than this.
    dw0 = tl.zeros([ROWS, D_BLOCK], tl.float32)
    dw1, dw2, dw3, db = dw0, dw0, dw0, dw0
    first_tile = part % parts * TILES
    for tile in range(first_tile, tl.minimum(first_tile + TILES, tl.cdiv(T, ROWS))):
        t = tile * ROWS + tl.arange(0, ROWS)
        t_ok = t < T
        first, _stop, state_row = _sequence(t, t_ok, b, T, first_ptr, index_ptr, PACKED)
        dz = _slope(x_ptr, w_ptr, bias_ptr, start_ptr, dy_ptr, t, t_ok, first, state_row, d, d_ok, x_t, x_d, dy_t,
                    dy_d, W, D, ROWS, D_BLOCK, HAS_BIAS, SILU, HAS_STATE)  # fmt: skip
        if STORE:
            spot = dz_ptr + (b * T + t)[:, None] * D + d[None, :]
            tl.store(spot, dz.to(dz_ptr.dtype.element_ty), mask=t_ok[:, None] & d_ok[None, :])
        if HAS_BIAS:
            db += dz
        for i in tl.static_range(W):
            x = _inputs(x_ptr, start_ptr, t, t_ok, i - W + 1, first, state_row, d, d_ok, x_t, x_d, W, D, HAS_STATE)
            if i == 0:
                dw0 += dz * x
            elif i == 1:
                dw1 += dz * x
            elif i == 2:
                dw2 += dz * x
            elif i == 3:
                dw3 += dz * x
            else:
                dw += tl.where((tap == i)[:, None], tl.sum(dz * x, 0)[None, :], 0.0)
    dw = _place(_place(_place(_place(_place(dw, tap, W, db), tap, 0, dw0), tap, 1, dw1), tap, 2, dw2), tap, 3, dw3)
    spot = dw_ptr + (part.to(tl.int64) * TAPS + tap)[:, None] * D + d[None, :]
    tl.store(spot, dw, mask=d_ok[None, :])


@triton.jit(do_not_specialize=["T"])
def _spread(
    dz_ptr,
    w_ptr,
    first_ptr,
    index_ptr,
    dx_ptr,
    T,
    dz_b,
    dz_t,
    dz_d,
    D: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dx: an input meets the outputs of its own token and of the W - 1 after it in its sequence."""
    d_blocks: tl.constexpr = (D + D_BLOCK - 1) // D_BLOCK
    d = tl.program_id(0) % d_blocks * D_BLOCK + tl.arange(0, D_BLOCK)
    tiles = tl.cdiv(T, ROWS)
    t = tl.program_id(0) // d_blocks % tiles * ROWS + tl.arange(0, ROWS)
    b = (tl.program_id(0) // d_blocks // tiles).to(tl.int64)
    t_ok = t < T
    d_ok = d < D
    dz_ptr += b * dz_b
    _first, stop, _row = _sequence(t, t_ok, b, T, first_ptr, index_ptr, PACKED)
    dx = tl.zeros([ROWS, D_BLOCK], tl.float32)
    for lag in tl.static_range(W):
        later = t + lag
        spot = dz_ptr + later.to(tl.int64)[:, None] * dz_t + d[None, :] * dz_d
        dz = tl.load(spot, mask=(t_ok & (later < stop))[:, None] & d_ok[None, :], other=0.0).to(tl.float32)
        dx += tl.load(w_ptr + d * W + (W - 1 - lag), mask=d_ok, other=0.0)[None, :] * dz
    spot = dx_ptr + (b * T + t)[:, None] * D + d[None, :]
    tl.store(spot, dx.to(dx_ptr.dtype.element_ty), mask=t_ok[:, None] & d_ok[None, :])


@triton.jit(do_not_specialize=["T"])
def _state_backward(
    x_ptr,
    w_ptr,
    bias_ptr,
    start_ptr,
    first_ptr,
    dy_ptr,
    dstart_ptr,
    T,
    x_b,
    x_t,
    x_d,
    dy_b,
    dy_t,
    dy_d,
    D: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The gradient of one sequence's state: entry s meets the tokens up to s."""
    d_blocks: tl.constexpr = (D + D_BLOCK - 1) // D_BLOCK
    d = tl.program_id(0) % d_blocks * D_BLOCK + tl.arange(0, D_BLOCK)
    n = (tl.program_id(0) // d_blocks).to(tl.int64)
    d_ok = d < D
    s = tl.arange(0, ROWS)
    first = s * 0
    stop = first + T
    if PACKED:
        first = tl.load(first_ptr + n) + s * 0
        stop = tl.load(first_ptr + n + 1) + s * 0
    else:
        x_ptr += n * x_b
        dy_ptr += n * dy_b
    ds = tl.zeros([ROWS, D_BLOCK], tl.float32)
    for lag in tl.static_range(1, W):
        t = first + s - (W - 1) + lag
        t_ok = (s < W - 1) & (t >= first) & (t < stop)
        dz = _slope(x_ptr, w_ptr, bias_ptr, start_ptr, dy_ptr, t, t_ok, first, n + s * 0, d, d_ok, x_t, x_d, dy_t,
                    dy_d, W, D, ROWS, D_BLOCK, HAS_BIAS, SILU, True)  # fmt: skip
        ds += tl.load(w_ptr + d * W + (W - 1 - lag), mask=d_ok, other=0.0)[None, :] * dz
    spot = dstart_ptr + (n * (W - 1) + s)[:, None] * D + d[None, :]
    tl.store(spot, ds, mask=(s < W - 1)[:, None] & d_ok[None, :])


class Sequences:
    """Where packed sequences begin and which one each position belongs to; no value is read by the host."""

    def __init__(self, T: int, cu_seqlens: Tensor | None) -> None:
        self.first = self.index = None
        if cu_seqlens is not None:
            self.first = cu_seqlens.to(torch.int32)
            position = torch.arange(T, dtype=torch.int32, device=cu_seqlens.device)
            self.index = (torch.searchsorted(self.first, position, right=True) - 1).to(torch.int32)


def forward(
    x: Tensor, w: Tensor, bias: Tensor | None, start: Tensor | None, silu: bool, sequences: Sequences
) -> Tensor:
    """x [B,T,D] of any strides; weight, bias and state float32 and contiguous -> y [B,T,D] in x's dtype."""
    B, T, D = x.shape
    y = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
    _forward[(_blocks(D) * B * triton.cdiv(T, ROWS),)](
        x, w, bias, start, sequences.first, sequences.index, y, T, *x.stride(), **_options(w, bias, silu, sequences),
        HAS_STATE=start is not None, num_warps=WARPS,
    )  # fmt: skip
    return y


def backward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    start: Tensor | None,
    silu: bool,
    sequences: Sequences,
    dy: Tensor,
    want_dx: bool,
    want_dstart: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """Gradients of x, the weight, the bias and the state."""
    (B, T, D), W = x.shape, w.shape[1]
    taps, parts = triton.next_power_of_2(W + 1), B * triton.cdiv(T, ROWS * TILES)
    dz = torch.empty(B, T, D, dtype=x.dtype, device=x.device) if want_dx and silu else dy
    dw = torch.empty(parts, taps, D, dtype=torch.float32, device=x.device)
    options = _options(w, bias, silu, sequences)
    strides = (*x.stride(), *dy.stride())
    _backward[(_blocks(D) * parts,)](
        x, w, bias, start, sequences.first, sequences.index, dy, dz, dw, T, *strides, **options,
        TAPS=taps, TILES=TILES, HAS_STATE=start is not None, STORE=dz is not dy, num_warps=WARPS,
    )  # fmt: skip
    dx = None
    if want_dx:
        dx = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
        _spread[(_blocks(D) * B * triton.cdiv(T, ROWS),)](
            dz, w, sequences.first, sequences.index, dx, T, *dz.stride(), D=D, W=W, ROWS=ROWS, D_BLOCK=_d_block(D),
            PACKED=sequences.first is not None, num_warps=WARPS,
        )  # fmt: skip
    dstart = None
    if start is not None and want_dstart:
        dstart = torch.empty_like(start)
        options["ROWS"] = triton.next_power_of_2(W)
        if start.numel() > 0:
            _state_backward[(_blocks(D) * start.shape[0],)](
                x, w, bias, start, sequences.first, dy, dstart, T, *strides, **options, num_warps=WARPS
            )
    total = dw.sum(0)
    return dx, total[:W].T.clone(memory_format=torch.contiguous_format), total[W].clone(), dstart


def _options(w: Tensor, bias: Tensor | None, silu: bool, sequences: Sequences) -> dict[str, object]:
    D, W = w.shape
    return {
        "D": D,
        "W": W,
        "ROWS": ROWS,
        "D_BLOCK": _d_block(D),
        "HAS_BIAS": bias is not None,
        "SILU": silu,
        "PACKED": sequences.first is not None,
    }


def _d_block(D: int) -> int:
    return min(64, triton.next_power_of_2(D))


def _blocks(D: int) -> int:
    return triton.cdiv(D, _d_block(D))
