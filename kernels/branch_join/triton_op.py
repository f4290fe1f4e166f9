"""The join's Triton kernels as one differentiable operator, opaque to torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.branch_join.triton_rows import backward, forward
from linearize.kernels.dispatch import on_device
from linearize.kernels.linear_attention.triton_common import last_dense

_INPUTS = "Tensor y, Tensor window, Tensor logit, Tensor scale, Tensor window_part"


@torch.library.custom_op("linearize::branch_join", mutates_args=(), schema=f"({_INPUTS}) -> Tensor")
def _forward_op(y: Tensor, window: Tensor, logit: Tensor, scale: Tensor, window_part: Tensor) -> Tensor:
    with on_device(y):
        return forward(y, window, logit, scale, window_part)


@_forward_op.register_fake
def _(y: Tensor, window: Tensor, logit: Tensor, scale: Tensor, window_part: Tensor) -> Tensor:
    return window.new_empty(window.shape)


@torch.library.custom_op(
    "linearize::branch_join_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor do) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    y: Tensor, window: Tensor, logit: Tensor, scale: Tensor, window_part: Tensor, do: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with on_device(y):
        return backward(y, window, logit, scale, window_part, do)


@_backward_op.register_fake
def _(
    y: Tensor, window: Tensor, logit: Tensor, scale: Tensor, window_part: Tensor, do: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dy, dwindow = (x.new_empty(x.shape) for x in (y, window))
    return dy, dwindow, torch.empty_like(logit), logit.new_empty((2, *scale.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
    dy, dwindow, dlogit, sums = _backward_op(*ctx.saved_tensors, do.contiguous())
    return dy, dwindow, dlogit, sums[0], sums[1]


_forward_op.register_autograd(_differentiate, setup_context=_save)


def branch_join_triton(
    y_BTHV: Tensor, window_BTHV: Tensor, logit_BTH: Tensor, scale_HV: Tensor, window_part_HV: Tensor
) -> Tensor:
    """Same arguments and results as `branch_join_reference`."""
    y, window = (last_dense(x.flatten(0, 1)) for x in (y_BTHV, window_BTHV))
    logit, scale, part = (x.float().contiguous() for x in (logit_BTH.flatten(0, 1), scale_HV, window_part_HV))
    return _forward_op(y, window, logit, scale, part).view(window_BTHV.shape)
