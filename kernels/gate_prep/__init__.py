"""Gate preparation: from raw projections to log decays, gated keys and steps, in one pass."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.gate_prep.chunked import ddts_gates_chunked, softplus_gate_chunked
from linearize.kernels.gate_prep.reference import ddts_gates_reference, softplus_gate_reference

__all__ = ["ddts_gates", "softplus_gate"]

MAX_WIDTH = 8192
"""Widest key the Triton kernels take: a tile holds whole keys."""


def ddts_gates(
    a: Tensor,
    b: Tensor,
    k: Tensor,
    *,
    a_bias: Tensor | None = None,
    b_bias: Tensor | None = None,
    activation: Literal["silu"] | None = None,
    eps: float = 1e-12,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """DDTS gates: log decay `-g τ` and key `k / max(‖k‖, eps) ⊙ g^τ`, with `g = softplus(a)` and `τ = σ(b)`.

    Computed in float32 (float64 if a or k has it), the input gate `g^τ` as `exp(τ log g)`, where log g is a itself once
    softplus underflows; values and gradients are right for a and b of any size. Differentiable (once) in every tensor.

    Args:
        a, b: [B, T, H, K] raw projections, any float dtype, any strides.
        k: [B, T, H, K] keys before normalisation, any float dtype, any strides.
        a_bias, b_bias: [H, K], added to a and b in float32. Default: none.
        activation: "silu", which k passes through before all else. Default: None.
        eps: least length a key is divided by. Default: 1e-12.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference".

    Returns:
        log_decay: [B, T, H, K], natural log, ≤ 0, float32 (or float64).
        key: [B, T, H, K], in k's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: Rodimus* (arXiv:2410.06577), data-dependent tempered selection.
    """
    name = "ddts_gates"
    if activation not in (None, "silu"):
        raise ValueError(f'{name}: activation is {activation!r}; use "silu" or None')
    silu = activation is not None
    dims: dict[str, int] = {}
    tensors = {"a": a, "b": b, "k": k, "a_bias": a_bias, "b_bias": b_bias}
    for part, value in tensors.items():
        if value is not None:
            check_tensor(name, part, value, ("H", "K") if part.endswith("bias") else ("B", "T", "H", "K"), dims)
    check_float(name, tensors)
    check_same_device(name, tensors)
    unsupported = _no_kernel_for(*tensors.values())
    if dims["K"] > MAX_WIDTH:
        unsupported = f"the Triton kernels take keys up to K={MAX_WIDTH}, not {dims['K']}"
    chosen = resolve_backend(backend, k.device, operation=name, unsupported=unsupported)
    if chosen == "triton" and k.numel() > 0:
        from linearize.kernels.gate_prep.triton_op import ddts_gates_triton

        return ddts_gates_triton(a, b, k, a_bias, b_bias, silu, eps)
    run = ddts_gates_reference if chosen == "reference" else ddts_gates_chunked
    return run(a, b, k, a_bias, b_bias, silu, eps)


def softplus_gate(
    x: Tensor, A_log: Tensor, bias: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Log decay `-exp(A_log) · softplus(x + bias)` and step `softplus(x + bias)`.

    Computed in float32 (float64 if x has it). Differentiable (once) in every tensor.

    Args:
        x: [B, T, H], or [B, T, H, K] for a decay per channel; any float dtype, any strides.
        A_log: [H], log of the rate; or [H, K] with such an x.
        bias: [H], or [H, K] with such an x, added in float32. Default: none.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference".

    Returns:
        log_decay: x's shape, natural log, ≤ 0, float32 (or float64).
        step: x's shape, ≥ 0, float32 (or float64).

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: Mamba-2 (arXiv:2405.21060); Gated DeltaNet (arXiv:2412.06464), which uses the log decay alone.
    """
    name = "softplus_gate"
    dims: dict[str, int] = {}
    four = isinstance(x, Tensor) and x.dim() == 4
    check_tensor(name, "x", x, ("B", "T", "H", "K") if four else ("B", "T", "H"), dims)
    tensors = {"x": x, "A_log": A_log, "bias": bias}
    for part in ("A_log", "bias"):
        value = tensors[part]
        if value is not None:
            per_channel = four and isinstance(value, Tensor) and value.dim() == 2
            check_tensor(name, part, value, ("H", "K") if per_channel else ("H",), dims)
    check_float(name, tensors)
    check_same_device(name, tensors)
    chosen = resolve_backend(backend, x.device, operation=name, unsupported=_no_kernel_for(*tensors.values()))
    A_log = _per_channel(A_log, x)
    bias = None if bias is None else _per_channel(bias, x)
    if chosen == "triton" and x.numel() > 0:
        from linearize.kernels.gate_prep.triton_op import softplus_gate_triton

        return softplus_gate_triton(x, A_log, bias)
    run = softplus_gate_reference if chosen == "reference" else softplus_gate_chunked
    return run(x, A_log, bias)


def _per_channel(parameter: Tensor, x: Tensor) -> Tensor:
    """A parameter of [H] or of x's inner dimensions as the latter."""
    inner = x.shape[2:]
    return (parameter[:, None] if parameter.dim() < len(inner) else parameter).expand(inner)


def _no_kernel_for(*tensors: Tensor | None) -> str | None:
    """Why these tensors have no Triton kernel, or None if they have one."""
    if any(t is not None and t.dtype == torch.float64 for t in tensors):
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    return None
