"""Window attention's Triton passes as one differentiable operator, opaque to torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.linear_attention.triton_common import last_dense, operand_dtype
from linearize.kernels.window_attention.triton_backward import backward
from linearize.kernels.window_attention.triton_band import Band
from linearize.kernels.window_attention.triton_forward import forward

_BAND = "float scale, int window, int sinks, float? softcap, Tensor? key_mask, Tensor? cu_seqlens"


@torch.library.custom_op(
    "linearize::window_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_BAND}) -> (Tensor, Tensor)",
)
def _forward_op(q: Tensor, k: Tensor, v: Tensor, scale: float, *band: Any) -> tuple[Tensor, Tensor]:
    with on_device(q):
        return forward(q, k, v, scale, Band(k.shape[1], *band))


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _K = q.shape
    return v.new_empty(B, T, H, v.shape[3]), q.new_empty(B, T, H, dtype=torch.float32)


@torch.library.custom_op(
    "linearize::window_attention_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, Tensor? dlse, "
    f"{_BAND}) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    scale: float,
    *band: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    with on_device(q):
        return backward(q, k, v, o, lse, do, dlse, scale, Band(k.shape[1], *band))[:3]


@_backward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.band, key_mask, cu_seqlens = inputs
    ctx.save_for_backward(q, k, v, *output, key_mask, cu_seqlens)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, key_mask, cu_seqlens = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else last_dense(do)
    dlse = None if dlse is None else dlse.contiguous()
    gradients = _backward_op(q, k, v, o, lse, do, dlse, *ctx.band, key_mask, cu_seqlens)
    return (*gradients, None, None, None, None, None, None)


_forward_op.register_autograd(_differentiate, setup_context=_save)


def window_attention_triton(
    q_BTHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    key_mask_BS: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `window_attention_reference`."""
    dtype = operand_dtype(q_BTHK, k_BSHK, v_BSHV)
    if torch.is_autocast_enabled(q_BTHK.device.type):
        dtype = torch.get_autocast_dtype(q_BTHK.device.type)
    q, k, v = (last_dense(x.to(dtype)) for x in (q_BTHK, k_BSHK, v_BSHV))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    o, lse = _forward_op(q, k, v, scale, window, sinks, softcap, key_mask_BS, cu_seqlens)
    return o.to(v_BSHV.dtype), lse
