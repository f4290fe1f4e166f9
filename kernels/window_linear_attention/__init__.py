"""One normaliser over a softmax window and a linear rest (the LoLCATs form)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.checks import check_cu_seqlens, check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.linear_attention import MAX_KEY_WIDTH
from linearize.kernels.window_attention.arguments import check_band, no_kernel_for
from linearize.kernels.window_linear_attention.arguments import check_all_heads, check_mask, check_shift
from linearize.kernels.window_linear_attention.decode import leaving_key, window_linear_attention_step
from linearize.kernels.window_linear_attention.parallel import Branches, branches, join
from linearize.kernels.window_linear_attention.reference import window_linear_attention_reference

__all__ = [
    "Branches",
    "branches",
    "join",
    "leaving_key",
    "window_linear_attention",
    "window_linear_attention_step",
]

_NAME = "window_linear_attention"


def window_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    mix: Tensor,
    *,
    window: int,
    scale: float | None = None,
    softcap: float | None = None,
    shift: str = "window",
    key_mask: Tensor | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Softmax over the last `window` keys and linear attention over all earlier ones, under one normaliser.

        o_t = [ e^{x_t} a_t + Σ_{j <= t - window} (phi_q_t·phi_k_j) v_j ] / [ e^{x_t} + Σ (phi_q_t·phi_k_j) ]

    a_t is the window's softmax attention and x_t = -mix, or with `shift="none"` x_t = lse_t - mix, lse_t being the
    log-sum-exp of the window's logits: then every key of the window weighs e^{logit - mix} beside phi_q·phi_k. x_t is
    kept inside ±60. The window rolls, in training as in decoding, and a key enters the sums when it leaves it.
    Differentiable (once) in q, k, v, the features and mix.

    Args:
        q: [B, T, H, K], any float dtype.
        k: [B, S, Hk, K], v: [B, S, Hv, V], the queries being the last T of S positions; S is T at a sequence's
            start, at most T + window, and T + window beside an `initial_state`. Hk and Hv divide H.
        phi_q: [B, T, H, F], phi_k: [B, P, Hf, F], features with products >= 0. Those of the last `window` keys are
            not read and may be left out: P >= S - window.
        mix: [H], natural logarithm of the linear sums' weight.
        window: keys of the softmax, the query's own among them, >= 1.
        scale: multiplies the logits. Default: `K ** -0.5`.
        softcap: replaces each scaled logit x by `softcap * tanh(x / softcap)`. Default: None.
        shift: "window" or "none". Default: "window".
        key_mask: [B, S] bool, False at padding, which no query sees. Default: all real.
        initial_state: (memory [B, H, F, V], normaliser [B, H, F]), the sums over the keys before the S positions.
            Default: zeros.
        output_final_state: whether to return the sums after the last token, without its window. Default: False.
        cu_seqlens: [N + 1] int32 or int64, cumulative lengths [0, n1, n1+n2, ..., T] of N sequences packed along
            time; then B must be 1, S = T, and there are neither `key_mask` nor `initial_state`. Default: None.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference" (a loop).

    Returns:
        o: [B, T, H, V] in v's dtype.
        state: (memory, normaliser) in float32 (float64), [N, ...] with `cu_seqlens`; None unless asked for.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it and the fix.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: LoLCATs (arXiv:2410.10254), with a rolling window in place of its terraced one.
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "T", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "S", "Hk", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "S", "Hv", "V"), dims)
    check_tensor(_NAME, "phi_q", phi_q, ("B", "T", "H", "F"), dims)
    check_tensor(_NAME, "phi_k", phi_k, ("B", "P", "Hf", "F"), dims)
    check_tensor(_NAME, "mix", mix, ("H",), dims)
    check_all_heads(_NAME, dims)
    check_band(_NAME, window, 0, softcap)
    check_shift(_NAME, shift)
    check_mask(_NAME, key_mask)
    if key_mask is not None:
        check_tensor(_NAME, "key_mask", key_mask, ("B", "S"), dims)
    earlier = dims["S"] - dims["T"]
    if not 0 <= earlier <= window or (initial_state is not None and earlier != window):
        raise ValueError(
            f"{_NAME}: k has S={dims['S']} positions for T={dims['T']} queries; at most window={window} more than T, "
            "and exactly that many more beside an initial_state"
        )
    if dims["P"] < dims["S"] - window:
        raise ValueError(
            f"{_NAME}: phi_k has P={dims['P']} positions; the keys that leave the window are {dims['S'] - window}"
        )
    tensors = {"q": q, "k": k, "v": v, "phi_q": phi_q, "phi_k": phi_k, "mix": mix}
    if initial_state is not None:
        tensors["memory"], tensors["normaliser"] = initial_state
        check_tensor(_NAME, "memory", tensors["memory"], ("B", "H", "F", "V"), dims)
        check_tensor(_NAME, "normaliser", tensors["normaliser"], ("B", "H", "F"), dims)
    if cu_seqlens is not None:
        check_cu_seqlens(_NAME, cu_seqlens, dims["B"], dims["T"])
        if key_mask is not None or earlier or initial_state is not None:
            raise ValueError(f"{_NAME}: cu_seqlens takes no key_mask, no earlier keys and no initial_state")
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "key_mask": key_mask, "cu_seqlens": cu_seqlens})
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=_no_kernel(q, k, v, phi_q, phi_k))
    options: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap, "key_mask_BS": key_mask}
    options |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    if chosen == "reference":
        o, state = window_linear_attention_reference(q, k, v, phi_q, phi_k, mix, shift=shift, **options)
        return o, state if output_final_state else None
    use_triton = chosen == "triton" and q.numel() > 0 and v.numel() > 0
    parts = branches(q, k, v, phi_q, phi_k, **options, backend="triton" if use_triton else "chunked")
    if use_triton:
        from linearize.kernels.window_linear_attention.triton_join import join_triton

        o = join_triton(parts, mix, shift)
    else:
        o = join(parts, mix, shift)
    return o.to(v.dtype), parts.state if output_final_state else None


def _no_kernel(q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor) -> str | None:
    """Why these tensors have no Triton kernel, or None if they have one."""
    if phi_q.shape[-1] > MAX_KEY_WIDTH:
        return f"the Triton kernels take up to F={MAX_KEY_WIDTH} features, not {phi_q.shape[-1]}"
    if torch.float64 in (phi_q.dtype, phi_k.dtype):
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    return no_kernel_for(q, k, v)
