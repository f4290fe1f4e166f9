"""Output norm and gate of a recurrent mixer in one pass: RMSNorm before or after an elementwise gate."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.norm_gate.reference import norm_gate_reference

__all__ = ["norm_gate"]

Order = Literal["norm_then_gate", "gate_then_norm"]
Activation = Literal["swish", "sigmoid"]

MAX_WIDTH = 16384
"""Widest row the Triton kernels take: a program holds it whole."""


def norm_gate(
    x: Tensor,
    weight: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    order: Order = "norm_then_gate",
    activation: Activation = "swish",
    eps: float = 1e-5,
    backend: str = "auto",
) -> Tensor:
    """RMSNorm over the last axis with a gain, and a gate: `RMSNorm(x) ⊙ act(gate)` or `RMSNorm(x ⊙ act(gate))`.

    `RMSNorm(y) = y / sqrt(mean(y²) + eps) ⊙ weight`. Computed in float32 (float64 if x has it), whatever the inputs'
    dtypes. Differentiable (once) in every tensor; the gain's gradient is summed in a fixed order.

    Args:
        x: [..., V], any float dtype, any strides: [B, T, H, V] norms each head, [B, T, D] the whole width.
        weight: [V], or [H, V] where x is [..., H, V]; the gain. Default: None, 1.
        gate: x's shape, the raw projection, any float dtype. Default: None, no gate.
        order: "norm_then_gate" (GLA, RetNet, Gated DeltaNet) or "gate_then_norm" (Rodimus, Mamba-2).
        activation: "swish", `g σ(g)`, or "sigmoid". Default: "swish".
        eps: added to the mean square. Default: 1e-5.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" (plain torch) or "reference" (likewise).

    Returns:
        x's shape and dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: RMSNorm (arXiv:1910.07467); gate before norm as Mamba-2 (arXiv:2405.21060), after as RetNet
    (arXiv:2307.08621).
    """
    name = "norm_gate"
    for option, value, known in (("order", order, get_args(Order)), ("activation", activation, get_args(Activation))):
        if value not in known:
            raise ValueError(f'{name}: {option} is "{value}"; use ' + " or ".join(f'"{way}"' for way in known))
    _check(name, x, weight, gate)
    unsupported = None
    if any(t is not None and t.dtype == torch.float64 for t in (x, weight, gate)):
        unsupported = "the Triton kernels take float16, bfloat16 and float32, not float64"
    elif x.shape[-1] > MAX_WIDTH:
        unsupported = f"the Triton kernels take rows up to V={MAX_WIDTH}, not {x.shape[-1]}"
    first, swish = order == "gate_then_norm", activation == "swish"
    if resolve_backend(backend, x.device, operation=name, unsupported=unsupported) == "triton" and x.numel() > 0:
        from linearize.kernels.norm_gate.triton_op import norm_gate_triton

        return norm_gate_triton(x, weight, gate, gate_first=first, swish=swish, eps=float(eps))
    return norm_gate_reference(x, weight, gate, gate_first=first, swish=swish, eps=float(eps))


def _check(name: str, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> None:
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise TypeError(f"{name}: x is {type(x).__name__}; pass a tensor of shape [..., V]")
    if weight is not None:
        per_head = isinstance(weight, Tensor) and weight.dim() == 2 and x.dim() >= 2
        check_tensor(name, "weight", weight, tuple(x.shape[-2:]) if per_head else (x.shape[-1],), {})
    if gate is not None:
        check_tensor(name, "gate", gate, tuple(x.shape), {})
    tensors = {"x": x, "weight": weight, "gate": gate}
    check_float(name, tensors)
    check_same_device(name, tensors)
