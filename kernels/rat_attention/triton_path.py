"""RAT attention on the GPU, put together: gated scans, rotation and attention, each a custom operator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.gated_scan.triton_op import scan
from linearize.kernels.linear_attention.triton_common import last_dense, operand_dtype
from linearize.kernels.rat_attention.cache import RatCache
from linearize.kernels.rat_attention.chunked import packed, remember, unpadded
from linearize.kernels.rat_attention.triton_backward import attend_backward
from linearize.kernels.rat_attention.triton_forward import attend_forward, rotate_rows


@torch.library.custom_op(
    "linearize::rat_rotate",
    mutates_args=(),
    schema="(Tensor x, Tensor cos, Tensor sin, int chunk, bool transposed) -> Tensor",
)
def _rotate_op(x: Tensor, cos: Tensor, sin: Tensor, chunk: int, transposed: bool) -> Tensor:
    with on_device(x):
        return rotate_rows(x, cos, sin, chunk, transposed=transposed)


@_rotate_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, chunk: int, transposed: bool) -> Tensor:
    return x.new_empty(x.shape)


def _save_rotation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.chunk, ctx.transposed = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate_rotation(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return _rotate_op(last_dense(dy), cos, sin, ctx.chunk, not ctx.transposed), None, None, None, None


_rotate_op.register_autograd(_differentiate_rotation, setup_context=_save_rotation)


@torch.library.custom_op(
    "linearize::rat_attend",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, int chunk, float scale) -> (Tensor, Tensor)",
)
def _attend_op(q: Tensor, k: Tensor, v: Tensor, chunk: int, scale: float) -> tuple[Tensor, Tensor]:
    with on_device(q):
        return attend_forward(q, k, v, chunk, scale)


@_attend_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, chunk: int, scale: float) -> tuple[Tensor, Tensor]:
    B, T, H, K = q.shape
    return v.new_empty(B, T, H, K), q.new_empty(B, H, T, dtype=torch.float32)


@torch.library.custom_op(
    "linearize::rat_attend_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, int chunk, float scale) "
    "-> (Tensor, Tensor, Tensor)",
)
def _attend_backward_op(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, chunk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with on_device(q):
        return attend_backward(q, k, v, o, lse, do, chunk, scale)


@_attend_backward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, chunk: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.chunk, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse = ctx.saved_tensors
    dq, dk, dv = _attend_backward_op(q, k, v, o, lse, last_dense(do), ctx.chunk, ctx.scale)
    return dq, dk, dv, None, None


_attend_op.register_autograd(_differentiate, setup_context=_save)


def rat_attention_triton(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    gate_BTHK: Tensor,
    *,
    chunk_size: int,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    cache: RatCache | None = None,
    key_mask_BT: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Same arguments and results as `rat_attention_reference`; a cache must be empty and without a mask."""
    options: dict[str, Any] = {
        "chunk_size": chunk_size,
        "position_embeddings": position_embeddings,
        "scale": scale,
    }
    inputs = (q_BTHK, k_BTHK, v_BTHK, gate_BTHK)
    if cu_seqlens is not None:
        return packed(rat_attention_triton, inputs, cu_seqlens, options)
    if key_mask_BT is not None:
        return unpadded(rat_attention_triton, inputs, key_mask_BT, cache=None, **options)

    dtype = operand_dtype(q_BTHK, k_BTHK, v_BTHK)
    if torch.is_autocast_enabled(q_BTHK.device.type):
        dtype = torch.get_autocast_dtype(q_BTHK.device.type)
    q = last_dense(q_BTHK.to(dtype))
    want_end = cache is not None
    own_k, end_k = _running_mean(k_BTHK.to(dtype), gate_BTHK, chunk_size, want_end)
    own_v, end_v = _running_mean(v_BTHK.to(dtype), gate_BTHK, chunk_size, want_end)
    if position_embeddings is not None:
        cos, sin = (x.float().contiguous() for x in position_embeddings)
        q, own_k = (_rotate_op(x, cos, sin, chunk_size, False) for x in (q, own_k))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    o, _ = _attend_op(q, own_k, own_v, chunk_size, scale)
    if cache is not None and end_k is not None and end_v is not None:
        keys, values = (
            x[:, chunk_size - 1 :: chunk_size].transpose(1, 2).to(like.dtype)
            for x, like in ((own_k, k_BTHK), (own_v, v_BTHK))
        )
        remember(cache, keys, values, [end_k[:, None], end_v[:, None]], None, q.shape[1])
    return o.to(v_BTHK.dtype)


def _running_mean(x_BTGK: Tensor, gate_BTHK: Tensor, chunk_size: int, want_end: bool) -> tuple[Tensor, Tensor | None]:
    heads, gates = x_BTGK.shape[2], gate_BTHK.shape[2]
    G = math.lcm(heads, gates)
    if G not in (heads, gates):  # neither is a multiple of the other
        x_BTGK = x_BTGK.repeat_interleave(G // heads, dim=2)
    return scan(x_BTGK, gate_BTHK, chunk_size, want_end=want_end)
