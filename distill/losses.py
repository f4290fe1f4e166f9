"""Losses between activations, in float32. Losses of next tokens are kernels: `linearize.kernels.linear_loss`."""

from __future__ import annotations

import torch

from linearize.distill.processes import common


def normalized_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`‖output - target‖² / ‖target‖²` in float32: 1 for a zero output, whatever the layer's scale.

    While several processes share a batch, `‖target‖²` is that of the whole batch (see `common`).
    """
    target = target.float()
    return (output.float() - target).square().sum() / common(target.square().sum()).clamp_min(1e-12)
