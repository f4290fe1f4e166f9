"""The window's and the linear sums' parts joined on the GPU, forward and backward, in one pass over memory each.

With w = e^x the window's weight, n and s the sums with and without values and a the window's output,

    o = a + (n − s a) / (s + w),

so do·(1/(s + w)) is n's gradient, do·w/(s + w) is a's, −Σ do·o/(s + w) is s's and −w Σ do·(o − a)/(s + w) is x's.
Bounds: three tensors of the output's size are moved forward, five and a row of numbers backward.

Suffixes: B batch, T time, H heads, V width; P = T − lag queries have sums.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.window_linear_attention.parallel import Branches
from linearize.kernels.window_linear_attention.reference import LARGEST_EXPONENT


@triton.jit
def _parts(n_ptr, s_ptr, lse_ptr, mix_ptr, begin_ptr, row, ok, iv, T, lag, window, LIMIT: tl.constexpr,
           H: tl.constexpr, V: tl.constexpr, SHIFTED: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Sums, window weight, where the exponent is free, rows of the sums and which rows have them."""
    t = row // H % T
    exists = ok & (t >= lag)
    source = row - (row // (H * T) + 1) * (lag * H)
    some = exists
    if PACKED:
        begin = tl.load(begin_ptr + t, mask=ok, other=0)
        some = exists & (t - begin >= window)
    n = tl.load(n_ptr + source[:, None] * V + iv[None, :], mask=some[:, None] & (iv < V)[None, :], other=0.0)
    s = tl.load(s_ptr + source, mask=some, other=0.0).to(tl.float32)
    x = -tl.load(mix_ptr + row % H, mask=ok, other=0.0)
    if not SHIFTED:
        x += tl.load(lse_ptr + row, mask=ok, other=0.0)
    free = (x > -LIMIT) & (x < LIMIT)
    w = tl.exp(tl.minimum(tl.maximum(x, -LIMIT), LIMIT))
    return n.to(tl.float32), s, w, free, source, exists, some


@triton.jit(do_not_specialize=["T", "lag", "window", "rows"])
def _forward(
    n_ptr,
    s_ptr,
    a_ptr,
    lse_ptr,
    mix_ptr,
    begin_ptr,
    o_ptr,
    T,
    lag,
    window,
    rows,
    LIMIT: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    V_BLOCK: tl.constexpr,
    SHIFTED: tl.constexpr,
    PACKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = row < rows
    iv = tl.arange(0, V_BLOCK)
    n, s, w, _free, _source, _exists, _some = _parts(
        n_ptr, s_ptr, lse_ptr, mix_ptr, begin_ptr, row, ok, iv, T, lag, window, LIMIT, H, V, SHIFTED, PACKED
    )
    mask = ok[:, None] & (iv < V)[None, :]
    place = row[:, None] * V + iv[None, :]
    a = tl.load(a_ptr + place, mask=mask, other=0.0).to(tl.float32)
    o = a + (n - s[:, None] * a) / (s + w)[:, None]
    tl.store(o_ptr + place, o.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "lag", "window", "rows"])
def _backward(
    n_ptr,
    s_ptr,
    a_ptr,
    lse_ptr,
    mix_ptr,
    begin_ptr,
    do_ptr,
    dn_ptr,
    ds_ptr,
    da_ptr,
    dx_ptr,
    T,
    lag,
    window,
    rows,
    LIMIT: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    V_BLOCK: tl.constexpr,
    SHIFTED: tl.constexpr,
    PACKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = row < rows
    iv = tl.arange(0, V_BLOCK)
    n, s, w, free, source, exists, some = _parts(
        n_ptr, s_ptr, lse_ptr, mix_ptr, begin_ptr, row, ok, iv, T, lag, window, LIMIT, H, V, SHIFTED, PACKED
    )
    in_width = (iv < V)[None, :]
    mask = ok[:, None] & in_width
    place = row[:, None] * V + iv[None, :]
    a = tl.load(a_ptr + place, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + place, mask=mask, other=0.0).to(tl.float32)
    share = 1.0 / (s + w)
    rest = (n - s[:, None] * a) * share[:, None]  # o − a
    dn = tl.where(some[:, None], do * share[:, None], 0.0)
    ds = tl.where(some, -tl.sum(do * (a + rest), 1) * share, 0.0)
    dx = tl.where(free, -tl.sum(do * rest, 1) * share * w, 0.0)
    tl.store(da_ptr + place, (do * (w * share)[:, None]).to(da_ptr.dtype.element_ty), mask=mask)
    n_spot = dn_ptr + source[:, None] * V + iv[None, :]
    tl.store(n_spot, dn.to(dn_ptr.dtype.element_ty), mask=exists[:, None] & in_width)
    tl.store(ds_ptr + source, ds.to(ds_ptr.dtype.element_ty), mask=exists)
    tl.store(dx_ptr + row, dx, mask=ok)


def _launch(
    a: Tensor, P: int, window: int, shifted: bool, packed: bool
) -> tuple[tuple[int], list[int], dict[str, Any]]:
    B, T, H, V = a.shape
    block = triton.next_power_of_2(V)
    count = max(1, 4096 // block)
    options = {"LIMIT": LARGEST_EXPONENT, "H": H, "V": V, "ROWS": count, "V_BLOCK": block}
    options |= {"SHIFTED": shifted, "PACKED": packed, "num_warps": 4}
    return (triton.cdiv(B * T * H, count),), [T, T - P, window, B * T * H], options


@torch.library.custom_op(
    "linearize::window_linear_join",
    mutates_args=(),
    schema="(Tensor n, Tensor s, Tensor a, Tensor lse, Tensor mix, Tensor? begin, int window, bool shifted) -> Tensor",
)
def _forward_op(
    n: Tensor, s: Tensor, a: Tensor, lse: Tensor, mix: Tensor, begin: Tensor | None, window: int, shifted: bool
) -> Tensor:
    grid, numbers, options = _launch(a, n.shape[1], window, shifted, begin is not None)
    o = torch.empty_like(a)
    with on_device(a):
        _forward[grid](n, s, a, lse, mix, begin, o, *numbers, **options)
    return o


@_forward_op.register_fake
def _(n: Tensor, s: Tensor, a: Tensor, lse: Tensor, mix: Tensor, begin: Tensor | None, *_: Any) -> Tensor:
    return torch.empty_like(a)


@torch.library.custom_op(
    "linearize::window_linear_join_backward",
    mutates_args=(),
    schema="(Tensor n, Tensor s, Tensor a, Tensor lse, Tensor mix, Tensor? begin, int window, bool shifted, Tensor do) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    n: Tensor,
    s: Tensor,
    a: Tensor,
    lse: Tensor,
    mix: Tensor,
    begin: Tensor | None,
    window: int,
    shifted: bool,
    do: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grid, numbers, options = _launch(a, n.shape[1], window, shifted, begin is not None)
    dn, ds, da, dx = (torch.empty_like(x) for x in (n, s, a, lse))
    with on_device(a):
        _backward[grid](n, s, a, lse, mix, begin, do, dn, ds, da, dx, *numbers, **options)
    return dn, ds, da, dx


@_backward_op.register_fake
def _(n: Tensor, s: Tensor, a: Tensor, lse: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(n), torch.empty_like(s), torch.empty_like(a), torch.empty_like(lse)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.window, ctx.shifted = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    dn, ds, da, dx = _backward_op(*ctx.saved_tensors, ctx.window, ctx.shifted, do.contiguous())
    return dn, ds, da, None if ctx.shifted else dx, -dx.sum((0, 1)), None, None, None


_forward_op.register_autograd(_differentiate, setup_context=_save)


def join_triton(parts: Branches, mix_H: Tensor, shift: str) -> Tensor:
    """As `join`."""
    n, s, a, lse = (x.contiguous() for x in (parts.numerator, parts.denominator, parts.inside, parts.lse))
    mix, shifted = mix_H.float().contiguous(), shift == "window"
    return _forward_op(n, s, a, lse, mix, parts.begin, parts.window, shifted)
