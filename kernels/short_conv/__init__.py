"""Short causal depthwise convolution."""

from __future__ import annotations

from torch import Tensor

from linearize.kernels.checks import check_cu_seqlens, check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.short_conv.arguments import check_activation, no_kernel_for
from linearize.kernels.short_conv.chunked import short_conv_chunked
from linearize.kernels.short_conv.decode import short_conv_step
from linearize.kernels.short_conv.reference import short_conv_reference

__all__ = ["short_conv", "short_conv_step"]

_NAME = "short_conv"


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution: `y_t = activation(bias + Σ_i weight[:, i] ⊙ x_{t − W + 1 + i})`.

    Differentiable (once) in every tensor. Computed in float32, or float64 if an input has it.

    Args:
        x: [B, T, D], any float dtype, any strides; T may be 0.
        weight: [D, W], W >= 1; its last column meets the current token. A depthwise `nn.Conv1d`'s weight is
            this with a dimension of one in the middle.
        bias: [D] or None. Default: None.
        activation: None or "silu". Default: None.
        initial_state: [B, W - 1, D], the inputs before the first token, oldest first ([N, W - 1, D] with
            `cu_seqlens`). Default: zeros.
        output_final_state: whether to return the last W - 1 inputs. Default: False.
        cu_seqlens: [N + 1] int32 or int64, cumulative lengths [0, n1, n1+n2, ..., T] of N sequences packed
            along time, read by the host in plain torch; then B must be 1, a sequence may be empty, and none reads another's inputs.
            Default: None.
        backend: "auto" (Triton on CUDA, else shifted products in plain torch), "triton", "chunked" or "reference"
            (a loop).

    Returns:
        y: [B, T, D] in x's dtype.
        state: [B, W - 1, D] (with `cu_seqlens` [N, W - 1, D]) in x's dtype, whose values it holds; None
            unless `output_final_state`.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names the
            argument and the fix.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: H3 (arXiv:2212.14052), Mamba (arXiv:2312.00752).
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "x", x, ("B", "T", "D"), dims)
    check_tensor(_NAME, "weight", weight, ("D", "W"), dims)
    if dims["W"] < 1:
        raise ValueError(f"{_NAME}: weight has shape {tuple(weight.shape)}; it must have at least one tap")
    if bias is not None:
        check_tensor(_NAME, "bias", bias, ("D",), dims)
    states = dims["B"]
    if cu_seqlens is not None:
        states = check_cu_seqlens(_NAME, cu_seqlens, dims["B"], dims["T"])
    if initial_state is not None:
        check_tensor(_NAME, "initial_state", initial_state, (states, dims["W"] - 1, dims["D"]), {})
    tensors = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "cu_seqlens": cu_seqlens})
    check_activation(_NAME, activation)
    unsupported = no_kernel_for(x, weight, bias, initial_state)
    chosen = resolve_backend(backend, x.device, operation=_NAME, unsupported=unsupported)
    if chosen == "triton" and x.numel() > 0:
        from linearize.kernels.short_conv.triton_op import short_conv_triton as run
    elif chosen == "reference":
        run = short_conv_reference
    else:
        run = short_conv_chunked
    y, state = run(x, weight, bias, activation, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return y, state if output_final_state else None
