"""The specification: window attention as one dense masked softmax."""

from __future__ import annotations

import torch
from torch import Tensor


def window_attention_reference(
    q_BTHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    key_mask_BS: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B,T,H,V] and log-sum-exp [B,T,H]; arguments as `window_attention`."""
    _B, T, H, K = q_BTHK.shape
    S = k_BSHK.shape[1]
    dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
    scale = K**-0.5 if scale is None else scale
    q = q_BTHK.to(dtype)
    k = k_BSHK.to(dtype).repeat_interleave(H // k_BSHK.shape[2], dim=2)
    v = v_BSHV.to(dtype).repeat_interleave(H // v_BSHV.shape[2], dim=2)

    logits = torch.einsum("bthk,bshk->bhts", q, k) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    visible = visible_keys(T, S, window, sinks, key_mask_BS, cu_seqlens, device=q_BTHK.device)
    logits = logits.masked_fill(~visible[:, None], float("-inf"))
    some = visible.any(-1)[:, None, :, None]
    p = torch.where(some, logits, 0.0).softmax(-1) * some
    lse = torch.where(some[..., 0], torch.where(some, logits, 0.0).logsumexp(-1), float("-inf"))
    o = torch.einsum("bhts,bshv->bthv", p, v)
    return o.to(v_BSHV.dtype), lse.transpose(1, 2)


def visible_keys(
    T: int,
    S: int,
    window: int,
    sinks: int,
    key_mask_BS: Tensor | None,
    cu_seqlens: Tensor | None,
    device: torch.device,
) -> Tensor:
    """[B or 1, T, S] which keys each query sees; the queries are the last T of the S positions."""
    key = torch.arange(S, device=device)
    query = torch.arange(S - T, S, device=device)[:, None]
    causal = key <= query
    near = key > query - window
    real = torch.ones(1, S, dtype=torch.bool, device=device) if key_mask_BS is None else key_mask_BS
    if cu_seqlens is None:
        # Position among the real keys, so that left padding does not use up the sinks.
        sink = (real.cumsum(1) <= sinks)[:, None]
        same = torch.ones(1, 1, dtype=torch.bool, device=device)
    else:
        bounds = cu_seqlens.to(torch.int64)
        sequence = torch.searchsorted(bounds, key, right=True) - 1
        sink = (key - bounds[sequence] < sinks)[None, None]
        same = sequence[query] == sequence
    return causal & same & (near | sink) & real[:, None]
