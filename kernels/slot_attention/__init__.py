"""Gated slot attention: softmax attention over a fixed number of slots that hold decaying keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import (
    check_cu_seqlens,
    check_float,
    check_log_decay_sign,
    check_same_device,
    check_tensor,
)
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.slot_attention.chunked import slot_attention_chunked
from linearize.kernels.slot_attention.decode import slot_attention_step
from linearize.kernels.slot_attention.reference import Slots, slot_attention_reference

__all__ = ["Slots", "slot_attention", "slot_attention_step"]

_NAME = "slot_attention"
MAX_WIDTH = 256  # of keys and of slots, in the Triton kernels


def slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Slots | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Slots | None]:
    """Attention over M slots: keys and values are written into slots that decay, and a query reads all slots.

        K̃_t = diag(exp(log_decay_t)) K̃_{t-1} + s_t k_tᵀ,   Ṽ_t = diag(exp(log_decay_t)) Ṽ_{t-1} + s_t v_tᵀ
        o_t = Ṽ_tᵀ softmax(scale · K̃_t q_t)

    Differentiable (once) in every tensor. Computed in float32, or float64 if an input has it; with Triton and
    16-bit inputs the products are taken in 16 bits, logits rounded to them included. The softmax is in float32.

    Args:
        q, k: [B, T, H, K], any float dtype, any strides; T may be 0.
        v: [B, T, H, V], any float dtype.
        s: [B, T, H, M], any float dtype: how much of the token each slot takes; GSA's is `1 - exp(log_decay)`.
        log_decay: [B, T, H, M], natural logarithm of each slot's decay, <= 0, kept in float32.
        scale: multiplies the logits. Default: `K ** -0.5`.
        initial_state: keys [B, H, M, K] and values [B, H, M, V] of the slots before the first token (with
            `cu_seqlens` [N, H, M, ·]). Default: zeros.
        output_final_state: whether to return the slots after the last token. Default: False.
        cu_seqlens: [N + 1] int32 or int64, cumulative lengths [0, n1, n1+n2, ..., T] of N sequences packed
            along time; then B must be 1, and a sequence may be empty. Default: None.
        backend: "auto" (Triton on CUDA, else chunked torch), "triton", "chunked" or "reference" (a loop).

    Returns:
        o: [B, T, H, V] in v's dtype.
        slots: (keys, values) shaped as `initial_state`, float32, or float64 if an input is float64; None unless
            `output_final_state`.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape, device or (on the CPU) sign; the
            message names the argument and the fix.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: Gated Slot Attention (arXiv:2409.07146), equations 6 to 8.
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "T", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "T", "H", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "T", "H", "V"), dims)
    check_tensor(_NAME, "s", s, ("B", "T", "H", "M"), dims)
    check_tensor(_NAME, "log_decay", log_decay, ("B", "T", "H", "M"), dims)
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "s": s, "log_decay": log_decay}
    states = dims["B"]
    if cu_seqlens is not None:
        states = check_cu_seqlens(_NAME, cu_seqlens, dims["B"], dims["T"])
    if initial_state is not None:
        for name, given, width in zip(("keys", "values"), initial_state, ("K", "V"), strict=True):
            shape = (states, dims["H"], dims["M"], dims[width])
            tensors[f"initial_state's {name}"] = check_tensor(_NAME, f"initial_state's {name}", given, shape, {})
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "cu_seqlens": cu_seqlens})
    check_log_decay_sign(_NAME, log_decay)
    unsupported = _no_kernel_for(dims, tensors)
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=unsupported)
    empty = 0 in (dims["B"], dims["T"], dims["H"])
    scale = dims["K"] ** -0.5 if scale is None else float(scale)
    if chosen == "reference" or empty:
        o, slots = slot_attention_reference(
            q, k, v, s, log_decay, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens
        )
    else:
        o, slots = slot_attention_chunked(
            q, k, v, s, log_decay, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, backend=chosen
        )
    return o, slots if output_final_state else None


def _no_kernel_for(dims: dict[str, int], tensors: dict[str, Tensor | None]) -> str | None:
    """Why this call has no Triton kernel, or None if it has one."""
    if any(x is not None and x.dtype == torch.float64 for x in tensors.values()):
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    if dims["M"] > MAX_WIDTH or dims["K"] > MAX_WIDTH:
        return f"the Triton kernels take K and M up to {MAX_WIDTH}, not K={dims['K']} and M={dims['M']}"
    return None
