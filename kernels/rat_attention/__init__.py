"""RAT attention: softmax attention over the gated running means of chunks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from linearize.kernels.checks import check_cu_seqlens, check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.gated_scan.arguments import check_chunk_size, check_gate
from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.rat_attention.arguments import check_cache, check_heads, check_tables
from linearize.kernels.rat_attention.cache import RatCache
from linearize.kernels.rat_attention.chunked import rat_attention_chunked
from linearize.kernels.rat_attention.decode import rat_attention_step
from linearize.kernels.rat_attention.reference import rat_attention_reference
from linearize.kernels.rat_attention.window_decode import rat_window_attention_step
from linearize.kernels.rat_attention.windowed import rat_window_attention

__all__ = [
    "RatCache",
    "rat_attention",
    "rat_attention_step",
    "rat_window_attention",
    "rat_window_attention_step",
]

_NAME = "rat_attention"


def rat_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    *,
    chunk_size: int,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    cache: RatCache | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sigmoid_gate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Causal attention over one key and value per earlier chunk and the running pair of the own chunk.

    Inside a chunk, from zero at its start, `k̃_t = g_t ⊙ k̃_{t-1} + (1 − g_t) ⊙ k_t`, and ṽ alike. Token t
    attends, in one softmax, to the last (k̃, ṽ) of every earlier chunk and to (k̃_t, ṽ_t). With chunks of one
    token and gates of 0 this is causal softmax attention. Differentiable (once) in q, k, v and gate, and
    through the cache. Computed in float32, or float64 if an input has it (the Triton path multiplies 16-bit
    inputs in 16 bits).

    Args:
        q: [B, T, Hq, K], any float dtype, any strides; T may be 0 and need not fill its last chunk.
        k: [B, T, Hk, K], v: [B, T, Hv, K], any float dtype. H is the largest number of heads among the inputs;
            each number divides it, and consecutive heads share one.
        gate: [B, T, Hg, K], in [0, 1], any float dtype: how much of the running pair is kept, per channel of
            both keys and values.
        chunk_size: how many tokens share a slot, a power of two.
        position_embeddings: (cos, sin), each [N, R] with one row per chunk and R <= K, in the layout of
            Hugging Face models: q and k̃ are turned by their chunk's row. Constants: they get no gradient.
            Default: no rotation.
        scale: multiplies the logits. Default: `K ** -0.5`.
        cache: the tokens come after those the cache has seen; it is updated to have seen these too. Default:
            none came before, and nothing is kept.
        key_mask: [B, T] bool, True for a real token, False for padding. The chunk grid of a row counts real
            tokens only, and outputs at padding are 0. Default: all real.
        cu_seqlens: [N + 1] int32 or int64, cumulative lengths [0, n1, n1+n2, ..., T] of N sequences packed
            along time, read by the host; then B must be 1 and there is neither cache nor `key_mask`. Default: None.
        sigmoid_gate: whether `gate` holds logits, any numbers, of which the sigmoid is taken in float32 (inside
            the kernels). Default: False.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference" (a loop).

    Returns:
        o: [B, T, H, K] in v's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape, device or (on the CPU) value; the
            message names the argument and the fix.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: RAT (arXiv:2507.04416).
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "T", "Hq", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "T", "Hk", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "T", "Hv", "K"), dims)
    check_tensor(_NAME, "gate", gate, ("B", "T", "Hg", "K"), dims)
    H = check_heads(_NAME, dims)
    check_chunk_size(_NAME, chunk_size, optional=False)
    if key_mask is not None:
        check_tensor(_NAME, "key_mask", key_mask, ("B", "T"), dims)
        if key_mask.dtype != torch.bool:
            raise TypeError(f"{_NAME}: key_mask has dtype {key_mask.dtype}; convert it to bool, True = real token")
    if cu_seqlens is not None:
        check_cu_seqlens(_NAME, cu_seqlens, dims["B"], dims["T"])
        if key_mask is not None or cache is not None:
            raise ValueError(f"{_NAME}: cu_seqlens takes neither a key_mask nor a cache")
    tensors = {"q": q, "k": k, "v": v, "gate": gate}
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "key_mask": key_mask, "cu_seqlens": cu_seqlens})
    if not sigmoid_gate:
        check_gate(_NAME, gate)
    length = dims["T"]
    if cache is not None:
        heads = math.lcm(dims["Hk"], dims["Hg"]), math.lcm(dims["Hv"], dims["Hg"])
        check_cache(_NAME, cache, dims["B"], heads, dims["K"], q.device)
        if cache.chunk_size != chunk_size:
            raise ValueError(
                f"{_NAME}: chunk_size is {chunk_size}, but the cache was made for {cache.chunk_size}; they must agree"
            )
        length += cache.length
    check_tables(_NAME, position_embeddings, -(-length // chunk_size), dims["K"], q.device)
    if position_embeddings is not None:
        position_embeddings = (position_embeddings[0].detach(), position_embeddings[1].detach())

    unsupported = _no_kernel_for(q, k, v, gate, cache, key_mask)
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=unsupported)
    options: dict[str, Any] = {
        "chunk_size": chunk_size,
        "position_embeddings": position_embeddings,
        "scale": scale,
        "cache": cache,
        "key_mask_BT": key_mask,
        "cu_seqlens": cu_seqlens,
    }
    if chosen == "triton" and q.numel() > 0:
        from linearize.kernels.rat_attention.triton_path import rat_attention_triton

        return rat_attention_triton(q, k, v, gate, **options, sigmoid_gate=sigmoid_gate)
    if sigmoid_gate:
        gate = torch.sigmoid(gate.to(compute_dtype(gate)))
    q = q if q.shape[2] == H else q.repeat_interleave(H // q.shape[2], dim=2)
    run = rat_attention_reference if chosen == "reference" else rat_attention_chunked
    return run(q, k, v, gate, **options)


def _no_kernel_for(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, cache: RatCache | None, key_mask: Tensor | None
) -> str | None:
    """Why this call has no Triton kernel, or None if it has one."""
    if any(x.dtype == torch.float64 for x in (q, k, v, gate)):
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    if q.shape[-1] > 256:
        return f"the Triton kernels take widths up to K=256, not {q.shape[-1]}"
    if cache is None:
        return None
    if key_mask is not None:
        return "the Triton kernels fill or go on from a cache without a key_mask only"
    if cache.position is not None:
        leaves = (q, k, v, gate, cache.keys, cache.running_key)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves):
            return "the Triton kernels go on from a cache without gradients only; use torch.no_grad()"
        if math.lcm(k.shape[2], gate.shape[2]) != math.lcm(v.shape[2], gate.shape[2]):
            return "the Triton kernels go on from a cache only where keys and values have as many running heads"
        if cache.running_key is not None and cache.running_key.dtype != torch.float32:
            return "the Triton kernels go on from a float32 cache only"
    return None
