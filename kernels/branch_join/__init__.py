"""A recurrence's output joined to a softmax window's, by a share of the softmax mass."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.branch_join.reference import branch_join_reference
from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend

__all__ = ["branch_join"]

MAX_WIDTH = 2048
"""Widest head the Triton kernels take: a tile holds whole heads."""


def branch_join(
    y: Tensor, window: Tensor, logit: Tensor, scale: Tensor, window_part: Tensor, *, backend: str = "auto"
) -> Tensor:
    """`window + σ(logit) (scale ⊙ y − window_part ⊙ window)`.

    Computed in float32 (float64 if y has it). Differentiable (once) in every tensor; gradients of scale and window_part
    are summed in a fixed order.

    Args:
        y: [B, T, H, V] the recurrence's output, any float dtype, any strides.
        window: [B, T, H, V] the window's output, any float dtype, any strides.
        logit: [B, T, H] logit of the share of the softmax mass outside the window, any float dtype.
        scale, window_part: [H, V].
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" (plain torch) or "reference" (likewise).

    Returns:
        [B, T, H, V] in window's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: this project (convert/mixers/hybrid.py); with scale and window_part 1 the mass-weighted mean of two outputs.
    """
    name = "branch_join"
    dims: dict[str, int] = {}
    tensors = {"y": y, "window": window, "logit": logit, "scale": scale, "window_part": window_part}
    shapes = {"y": "BTHV", "window": "BTHV", "logit": "BTH", "scale": "HV", "window_part": "HV"}
    for part, value in tensors.items():
        check_tensor(name, part, value, tuple(shapes[part]), dims)
    check_float(name, tensors)
    check_same_device(name, tensors)
    unsupported = None
    if any(t.dtype == torch.float64 for t in tensors.values()):
        unsupported = "the Triton kernels take float16, bfloat16 and float32, not float64"
    elif dims["V"] > MAX_WIDTH:
        unsupported = f"the Triton kernels take heads up to V={MAX_WIDTH}, not {dims['V']}"
    chosen = resolve_backend(backend, y.device, operation=name, unsupported=unsupported)
    if chosen == "triton" and y.numel() > 0:
        from linearize.kernels.branch_join.triton_op import branch_join_triton

        return branch_join_triton(y, window, logit, scale, window_part)
    return branch_join_reference(y, window, logit, scale, window_part)
