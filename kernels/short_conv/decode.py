"""One token of the short convolution: the state is updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.short_conv.arguments import check_activation, no_kernel_for

_NAME = "short_conv_step"


@torch.no_grad()
def short_conv_step(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """One decoding step of `short_conv`; no gradients.

    Args:
        x: [B, D], any float dtype.
        weight: [D, W]; its last column meets x.
        state: [B, W - 1, D], the last inputs, any float dtype and strides; overwritten with those after this
            token.
        bias: [D] or None.
        activation: None or "silu".
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference" (one here).

    Returns:
        y: [B, D] in x's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: Mamba (arXiv:2312.00752).
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "x", x, ("B", "D"), dims)
    check_tensor(_NAME, "weight", weight, ("D", "W"), dims)
    check_tensor(_NAME, "state", state, (dims["B"], dims["W"] - 1, dims["D"]), {})
    if bias is not None:
        check_tensor(_NAME, "bias", bias, ("D",), dims)
    tensors = {"x": x, "weight": weight, "state": state, "bias": bias}
    check_float(_NAME, tensors)
    check_same_device(_NAME, tensors)
    check_activation(_NAME, activation)
    chosen = resolve_backend(backend, x.device, operation=_NAME, unsupported=no_kernel_for(x, weight, state, bias))
    if chosen == "triton" and x.numel() > 0:
        from linearize.kernels.short_conv.triton_decode import step

        return step(x, weight, state, bias, activation == "silu")
    dtype = compute_dtype(x, weight, state, bias)
    seen_BWD = torch.cat([state.to(dtype), x[:, None].to(dtype)], dim=1)
    z = (seen_BWD * weight.to(dtype).T).sum(1)
    if bias is not None:
        z += bias.to(dtype)
    state.copy_(seen_BWD[:, 1:])
    return (torch.nn.functional.silu(z) if activation == "silu" else z).to(x.dtype)
