"""One token of window attention: the cache is a ring of slots, updated in place and never shifted."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.window_attention.arguments import check_band, check_heads, no_kernel_for

_NAME = "window_attention_step"


@torch.no_grad()
def window_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    key_mask: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """One decoding step of `window_attention`; no gradients.

    Token p of a sequence has slot p if p < sinks, else slot `sinks + (p - sinks) mod (N - sinks)`: the token
    overwrites the oldest one, nothing else moves. Padding never enters the cache, so a left-padded row goes on as if
    it had no padding.

    Args:
        q: [B, H, K], any float dtype.
        k: [B, Hk, K], v: [B, Hv, V], any float dtype.
        keys: [B, N, Hk, K], values: [B, N, Hv, V] with N >= sinks + window slots, any float dtype and strides; the
            token's slot is overwritten. `window_cache` fills them from a prompt.
        position: [B] int64, tokens each row has seen, padding not counted; advanced by one.
        window, sinks, scale, softcap: as `window_attention`.
        key_mask: [B] bool, False where the token is padding: such a row's cache and position stay as they are, and
            its output is 0. Default: all real.
        return_lse: whether to return the log-sum-exp as well. Default: False.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference" (one here).

    Returns:
        o: [B, H, V] in v's dtype.
        lse, only with `return_lse`: [B, H] float32 (float64), -inf at padding.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: sliding windows: Longformer (arXiv:2004.05150); sinks: StreamingLLM (arXiv:2309.17453).
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "Hk", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "Hv", "V"), dims)
    check_heads(_NAME, dims)
    check_tensor(_NAME, "keys", keys, ("B", "N", "Hk", "K"), dims)
    check_tensor(_NAME, "values", values, ("B", "N", "Hv", "V"), dims)
    check_tensor(_NAME, "position", position, ("B",), dims)
    if position.dtype != torch.int64:
        raise TypeError(f"{_NAME}: position has dtype {position.dtype}; convert it to int64")
    check_band(_NAME, window, sinks, softcap)
    if dims["N"] < sinks + window:
        raise ValueError(
            f"{_NAME}: keys has N={dims['N']} slots; a window of {window} and {sinks} sinks need {window + sinks}"
        )
    if key_mask is not None:
        check_tensor(_NAME, "key_mask", key_mask, ("B",), dims)
        if key_mask.dtype != torch.bool:
            raise TypeError(f"{_NAME}: key_mask has dtype {key_mask.dtype}; convert it to bool, True = real token")
    tensors = {"q": q, "k": k, "v": v, "keys": keys, "values": values}
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "position": position, "key_mask": key_mask})
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=no_kernel_for(q, k, v, keys, values))
    if chosen == "triton" and q.numel() > 0 and v.numel() > 0:
        from linearize.kernels.window_attention.triton_decode import step as run
    else:
        run = _step
    o, lse = run(q, k, v, keys, values, position, window, sinks, scale, softcap, key_mask)
    position.add_(1 if key_mask is None else key_mask)
    return (o, lse) if return_lse else o


def slot_of(position: Tensor, slots: int, sinks: int = 0) -> Tensor:
    """The slot of the token at each position, in a cache of `slots`."""
    return torch.where(position < sinks, position, sinks + (position - sinks) % (slots - sinks))


def last_tokens(slots: Tensor, position: Tensor, count: int) -> Tensor:
    """The last `count` tokens of a cache without sinks, [B, count, ...], oldest first.

    What stands before the first token of a row has no meaning. Token n of the result is the row's real one where
    `n >= count - position`.

    Args:
        slots: [B, N, ...] with N >= count.
        position: [B] int64, tokens each row has seen.
    """
    place = position[:, None] - count + torch.arange(count, device=slots.device)
    return slots[torch.arange(len(slots), device=slots.device)[:, None], place % slots.shape[1]]


def window_cache(
    k: Tensor, v: Tensor, slots: int, *, sinks: int = 0, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The cache for `window_attention_step` after a prompt.

    Args:
        k: [B, S, Hk, K], v: [B, S, Hv, V], the prompt's keys and values.
        slots: how many slots the cache has, >= sinks + window.
        sinks: as `window_attention`.
        key_mask: [B, S] bool, False at padding. Default: all real.

    Returns:
        keys [B, slots, Hk, K], values [B, slots, Hv, V] in k's and v's dtype, zeros in free slots, and position [B].
    """
    B, S = k.shape[:2]
    if key_mask is None and sinks == 0 and slots <= S:  # token p stands in slot p mod `slots`
        keys, values = (x[:, S - slots :].roll(S % slots, 1) for x in (k, v))
        return keys, values, torch.full((B,), S, device=k.device)
    slot = torch.arange(slots, device=k.device)
    if key_mask is None:
        key_mask = torch.ones(B, S, dtype=torch.bool, device=k.device)
    position = key_mask.sum(1)
    age = (position[:, None] - 1 - slot) % (slots - sinks)
    token = torch.where(slot < sinks, slot.expand(B, -1), position[:, None] - 1 - age)
    filled = (token >= 0) & (token < position[:, None]) & ((slot < sinks) | (token >= sinks))
    if S == 0:
        return k.new_zeros(B, slots, *k.shape[2:]), v.new_zeros(B, slots, *v.shape[2:]), position
    # Token n of a row is its n-th real one.
    place = torch.searchsorted(key_mask.long().cumsum(1), token.clamp(0) + 1).clamp_max(S - 1)
    keys, values = (
        x.gather(1, place[..., None, None].expand(-1, -1, *x.shape[2:])).masked_fill(~filled[..., None, None], 0)
        for x in (k, v)
    )
    return keys, values, position


def _step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    keys_BNHK: Tensor,
    values_BNHV: Tensor,
    position_B: Tensor,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None,
    real_B: Tensor | None,
) -> tuple[Tensor, Tensor]:
    (B, H, K), N = q_BHK.shape, keys_BNHK.shape[1]
    rows = torch.arange(B, device=q_BHK.device)
    here = slot_of(position_B, N, sinks)
    for cache, new in ((keys_BNHK, k_BHK), (values_BNHV, v_BHV)):
        kept = new.to(cache.dtype)
        if real_B is not None:
            kept = torch.where(real_B[:, None, None], kept, cache[rows, here])
        cache[rows, here] = kept

    dtype = compute_dtype(q_BHK, k_BHK, v_BHV)
    slot = torch.arange(N, device=q_BHK.device)
    age = (position_B[:, None] - slot) % (N - sinks)
    seen_BN = torch.where(
        slot < sinks, slot <= position_B[:, None], (age < window) & (age <= position_B[:, None] - sinks)
    )
    if real_B is not None:
        seen_BN = seen_BN & real_B[:, None]
    groups = keys_BNHK.shape[2]
    q_BGRK = q_BHK.to(dtype).view(B, groups, H // groups, K)
    logits_BHN = torch.einsum("bgrk,bngk->bgrn", q_BGRK, keys_BNHK.to(dtype)).reshape(B, H, N) * scale
    if softcap is not None:
        logits_BHN = softcap * torch.tanh(logits_BHN / softcap)
    logits_BHN = logits_BHN.masked_fill(~seen_BN[:, None], float("-inf"))
    lse_BH = logits_BHN.logsumexp(-1)
    p_BHN = (logits_BHN - lse_BH.clamp_min(torch.finfo(dtype).min)[..., None]).exp()
    groups = values_BNHV.shape[2]
    o = torch.einsum("bgrn,bngv->bgrv", p_BHN.view(B, groups, H // groups, N), values_BNHV.to(dtype))
    return o.reshape(B, H, -1).to(v_BHV.dtype), lse_BH
