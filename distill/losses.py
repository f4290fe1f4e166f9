"""Losses between activations, in float32. Losses of next tokens are kernels: `linearize.kernels.linear_loss`."""

from __future__ import annotations

from typing import Any

import torch

from linearize.distill.compiled import compilable
from linearize.distill.processes import common


def normalized_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`‖output - target‖² / ‖target‖²` in float32: 1 for a zero output, whatever the layer's scale.

    While several processes share a batch, `‖target‖²` is that of the whole batch (see `common`).
    """
    return _scaled_error(output, target, common(_squares(target)).clamp_min(1e-12).reciprocal())


@compilable
def _scaled_error(output: torch.Tensor, target: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`scale ‖output - target‖²`."""
    if output.dtype == target.dtype and output.dtype in (torch.bfloat16, torch.float16):
        return _Error16.apply(output, target, scale)  # type: ignore[no-untyped-call, no-any-return]
    return (output.float() - target.float()).square().sum() * scale


class _Error16(torch.autograd.Function):
    """`scale ‖output - target‖²`. The difference is kept in its 16 bits, as its gradient will be: no copy in float32."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, target: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        difference = output - target
        ctx.save_for_backward(difference, scale)
        return _squares(difference) * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        difference, scale = ctx.saved_tensors
        return difference * (2 * grad * scale), None, None


def _squares(x: torch.Tensor) -> torch.Tensor:
    """Sum of squares, in float32, without a copy in float32."""
    return torch.linalg.vector_norm(x, dtype=torch.float32).square()
