"""Softmax attention over a sliding window of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import check_cu_seqlens, check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.window_attention.arguments import check_band, check_heads, no_kernel_for
from linearize.kernels.window_attention.chunked import window_attention_chunked
from linearize.kernels.window_attention.decode import last_tokens, window_attention_step, window_cache
from linearize.kernels.window_attention.reference import window_attention_reference

__all__ = ["last_tokens", "window_attention", "window_attention_step", "window_cache"]

_NAME = "window_attention"


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal softmax attention of each query over the last `window` keys, its own included.

    The queries are the last T of the S positions that keys and values cover, so a cache of earlier keys is
    used by putting it before the new ones. A query that sees no key gives 0. Statistics are kept in float32
    (float64 for float64 inputs). Differentiable (once) in q, k and v, through the output and the log-sum-exp.

    Args:
        q: [B, T, H, K], any float dtype, any strides.
        k: [B, S, Hk, K] with S >= T; query head h reads key head h // (H / Hk). Hk = 1 is one shared key.
        v: [B, S, Hv, V], likewise with its own number of heads Hv.
        window: how many of the last keys a query sees, >= 1. At least S makes it plain causal attention.
        sinks: how many keys at the start of the sequence (the first real ones under `key_mask`) are always
            visible. Default: 0.
        scale: multiplies the logits. Default: `K ** -0.5`.
        softcap: replaces each scaled logit x by `softcap * tanh(x / softcap)`. Default: None.
        key_mask: [B, S] bool, True for a real key, False for padding. Default: all real.
        cu_seqlens: [N + 1] int32 or int64, cumulative lengths [0, n1, n1+n2, ..., T] of N sequences packed
            along time; then B must be 1, S = T and there is no `key_mask`. Default: None.
        return_lse: whether to return the log-sum-exp as well. Default: False.
        backend: "auto" (Triton on CUDA, else blocks of queries in plain torch), "triton", "chunked" or
            "reference" (one dense masked softmax).

    Returns:
        o: [B, T, H, V] in v's dtype.
        lse, only with `return_lse`: [B, T, H] float32 (float64), log-sum-exp of the scaled and capped logits
            of the visible keys, -inf where there is none.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it and
            the fix.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: sliding windows: Longformer (arXiv:2004.05150); sinks: StreamingLLM (arXiv:2309.17453); softcap:
    Gemma 2 (arXiv:2408.00118); one shared key: SW-SKA of Rodimus (arXiv:2410.06577).
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "T", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "S", "Hk", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "S", "Hv", "V"), dims)
    check_heads(_NAME, dims)
    if dims["S"] < dims["T"]:
        raise ValueError(
            f"{_NAME}: k has S={dims['S']} positions, fewer than q's T={dims['T']}; the queries are the last T keys"
        )
    check_band(_NAME, window, sinks, softcap)
    if key_mask is not None:
        check_tensor(_NAME, "key_mask", key_mask, ("B", "S"), dims)
        if key_mask.dtype != torch.bool:
            raise TypeError(f"{_NAME}: key_mask has dtype {key_mask.dtype}; convert it to bool, True = real key")
    if cu_seqlens is not None:
        check_cu_seqlens(_NAME, cu_seqlens, dims["B"], dims["T"])
        if key_mask is not None or dims["S"] != dims["T"]:
            raise ValueError(f"{_NAME}: cu_seqlens takes neither a key_mask nor earlier keys (S must equal T)")
    check_float(_NAME, {"q": q, "k": k, "v": v})
    check_same_device(_NAME, {"q": q, "k": k, "v": v, "key_mask": key_mask})
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=no_kernel_for(q, k, v))
    if chosen == "triton" and q.numel() > 0 and v.numel() > 0:
        from linearize.kernels.window_attention.triton_op import window_attention_triton as run
    elif chosen == "reference":
        run = window_attention_reference
    else:
        run = window_attention_chunked
    o, lse = run(
        q,
        k,
        v,
        window=window,
        sinks=sinks,
        scale=scale,
        softcap=softcap,
        key_mask_BS=key_mask,
        cu_seqlens=cu_seqlens,
    )
    return (o, lse) if return_lse else o
