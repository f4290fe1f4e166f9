"""One token of the window beside linear attention: ring and sums are updated in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.window_attention import window_attention_step
from linearize.kernels.window_attention.arguments import no_kernel_for
from linearize.kernels.window_linear_attention.arguments import check_all_heads, check_shift
from linearize.kernels.window_linear_attention.parallel import window_weight

_NAME = "window_linear_attention_step"
MAX_FEATURES = 512  # of the Triton kernel


def leaving_key(keys: Tensor, position: Tensor, window: int) -> Tensor:
    """The key that leaves the window with the next token, [B, Hk, K]; of no meaning while none does.

    Args:
        keys: [B, N, Hk, K] the ring of `window_linear_attention_step`.
        position: [B] int64, tokens each row has seen.
        window: keys of the softmax.
    """
    return keys[torch.arange(len(keys), device=keys.device), (position - window) % keys.shape[1]]


@torch.no_grad()
def window_linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    mix: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    *,
    window: int,
    scale: float | None = None,
    softcap: float | None = None,
    shift: str = "window",
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One decoding step of `window_linear_attention`; no gradients.

    The ring has a slot more than the window, which holds the key that has just left until it is in the sums.

    Args:
        q: [B, H, K], k: [B, Hk, K], v: [B, Hv, V], any float dtype.
        phi_q: [B, H, F] features of q. phi_k: [B, Hf, F] features of the key that leaves, `leaving_key`; not read
            while none does.
        mix: [H], as `window_linear_attention`.
        keys: [B, N, Hk, K], values: [B, N, Hv, V] with N >= window + 1, position: [B] int64: the cache of
            `window_attention_step`, filled by `window_cache`; updated in place.
        memory: [B, H, F, V] float32 (or float64), contiguous, normaliser: [B, H, F], likewise: updated in place.
        window, scale, softcap, shift: as `window_linear_attention`.
        key_mask: [B] bool, False where the token is padding: such a row's cache and sums stay as they are. Default:
            all real.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference" (one here).

    Returns:
        o: [B, H, V] in v's dtype; 0 at padding.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: LoLCATs (arXiv:2410.10254).
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "Hk", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "Hv", "V"), dims)
    check_tensor(_NAME, "phi_q", phi_q, ("B", "H", "F"), dims)
    check_tensor(_NAME, "phi_k", phi_k, ("B", "Hf", "F"), dims)
    check_tensor(_NAME, "mix", mix, ("H",), dims)
    check_tensor(_NAME, "memory", memory, ("B", "H", "F", "V"), dims)
    check_tensor(_NAME, "normaliser", normaliser, ("B", "H", "F"), dims)
    check_all_heads(_NAME, dims)
    check_shift(_NAME, shift)
    if keys.shape[1] <= window:
        raise ValueError(f"{_NAME}: keys has N={keys.shape[1]} slots; a window of {window} needs {window + 1}")
    for name, state in (("memory", memory), ("normaliser", normaliser)):
        if state.dtype not in (torch.float32, torch.float64) or not state.is_contiguous():
            raise TypeError(f"{_NAME}: {name} must be contiguous and in float32; it has dtype {state.dtype}")
    tensors = {"q": q, "phi_q": phi_q, "phi_k": phi_k, "mix": mix, "memory": memory, "normaliser": normaliser}
    check_float(_NAME, tensors)
    check_same_device(_NAME, tensors)
    unsupported = no_kernel_for(q, k, v, keys, values)
    if memory.dtype != torch.float32 or phi_q.shape[-1] > MAX_FEATURES:
        unsupported = f"the Triton kernel takes a float32 memory of up to {MAX_FEATURES} features"
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=unsupported)
    options: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap, "key_mask": key_mask}
    before = position.clone()
    inside, lse = window_attention_step(q, k, v, keys, values, position, **options, return_lse=True, backend=chosen)
    if chosen == "triton" and q.numel() > 0 and v.numel() > 0:
        from linearize.kernels.window_linear_attention.triton_decode import add_rest as run
    else:
        run = _add_rest
    return run(inside, lse, values, before, phi_q, phi_k, mix, memory, normaliser, window, shift, key_mask)


def _add_rest(
    inside: Tensor,
    lse: Tensor,
    values: Tensor,
    position: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    mix: Tensor,
    memory: Tensor,
    normaliser: Tensor,
    window: int,
    shift: str,
    key_mask: Tensor | None,
) -> Tensor:
    """The leaving pair goes into the sums, and those beside the window's output; `position` is the one before."""
    H, dtype = memory.shape[1], memory.dtype
    leaves = position >= window
    if key_mask is not None:
        leaves = leaves & key_mask
    value = leaving_key(values, position, window).to(dtype).repeat_interleave(H // values.shape[2], 1)
    key = phi_k.to(dtype).repeat_interleave(H // phi_k.shape[1], 1)
    key = torch.where(leaves[:, None, None], key, 0)
    memory.addcmul_(key[..., None], value[:, :, None])
    normaliser.add_(key)
    query = phi_q.to(dtype)
    numerator = torch.matmul(query[:, :, None], memory)[:, :, 0]
    denominator = (query * normaliser).sum(-1, keepdim=True)
    weight = window_weight(lse.to(dtype), mix, shift)[..., None]
    a = inside.to(dtype)
    o = a + (numerator - denominator * a) / (denominator + weight)
    if key_mask is not None:
        o = torch.where(key_mask[:, None, None], o, 0)
    return o.to(inside.dtype)
