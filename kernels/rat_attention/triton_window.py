"""RAT with a window on the GPU, one custom operator each way: attention over the window, then the summaries join it.

The backward pass hands both parts the whole softmax's output and log-sum-exp: their probabilities are then those of
the one softmax, and nothing of the window alone need be kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.linear_attention.triton_common import last_dense, operand_dtype
from linearize.kernels.rat_attention.triton_far import join, join_backward
from linearize.kernels.rat_attention.window_places import Places, places
from linearize.kernels.window_attention.triton_backward import backward
from linearize.kernels.window_attention.triton_band import Band
from linearize.kernels.window_attention.triton_forward import forward

_ARGUMENTS = "int width, float scale, float? softcap"


@torch.library.custom_op(
    "linearize::rat_window_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor offset, Tensor first, Tensor low, "
    f"Tensor high, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, offset: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    first, low, high, width, scale, softcap = rest
    seen = Places(first, low, high, k.shape[1], width)
    with on_device(q):
        near = forward(q, k, v, scale, _band(seen, softcap))
        join(q, (keys, values), offset, near, seen, scale, softcap)
    return near


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "linearize::rat_window_attention_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor offset, Tensor first, Tensor low, "
    f"Tensor high, Tensor o, Tensor lse, Tensor do, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, offset: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    first, low, high, o, lse, do, width, scale, softcap = rest
    seen = Places(first, low, high, k.shape[1], width)
    with on_device(q):
        dq, dk, dv, delta = backward(q, k, v, o, lse, do, None, scale, _band(seen, softcap))
        far = join_backward(q, (keys, values), offset, (do, lse, delta), dq, seen, scale, softcap)
    return dq, dk, dv, *far


@_backward_op.register_fake
def _(*tensors: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors[:6])


def _band(seen: Places, softcap: float | None) -> Band:
    return Band(seen.keys, seen.width, 0, softcap, first=seen.first)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, width, scale, softcap = inputs
    ctx.options = (width, scale, softcap)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, _lse: None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 12
    return (*_backward_op(*ctx.saved_tensors, last_dense(do), *ctx.options), *(None,) * 6)


_forward_op.register_autograd(_differentiate, setup_context=_save)


def rat_window_attention_triton(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    keys_BNGK: Tensor,
    values_BNGK: Tensor,
    offset_H: Tensor,
    *,
    window: int,
    chunk_size: int,
    origin_B: Tensor | None = None,
    reach: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Same arguments and results as `rat_window_attention_reference`."""
    tensors = (q_BTHK, k_BSGK, v_BSGK, keys_BNGK, values_BNGK)
    dtype = operand_dtype(*tensors)
    if torch.is_autocast_enabled(q_BTHK.device.type):
        dtype = torch.get_autocast_dtype(q_BTHK.device.type)
    dense = [last_dense(x.to(dtype)) for x in tensors]
    (_, T, _, K), S = q_BTHK.shape, k_BSGK.shape[1]
    seen = places(T, S, window, chunk_size, origin_B, reach, q_BTHK.device)
    scale = K**-0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    o, _ = _forward_op(
        *dense, offset_H.float().contiguous(), seen.first, seen.low, seen.high, seen.width, scale, softcap
    )
    return o.to(v_BSGK.dtype)
