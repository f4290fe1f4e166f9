"""The softmax window that stands beside every recurrent mixer, with its own small cache, a ring of slots."""

from __future__ import annotations

from typing import Any

import torch

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.mixers.parts import is_step
from linearize.kernels.window_attention import last_tokens, window_attention, window_attention_step, window_cache


def window_mix(
    spec: AttentionSpec,
    window: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    padding_mask: torch.Tensor | None,
    state: State | None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, State]:
    """Softmax attention over the last `window` keys, the token's own included.

    Args:
        q: `[B, T, H, K]` after RoPE; k, v: `[B, T, H_kv, K]`, k after RoPE.
        padding_mask: `[B, T]`, True at real tokens.
        state: holds `window_key`, `window_value` `[B, W, H_kv, K]`, in the slots of `window_attention_step`, and
            `window_position` `[B]`. One token of decoding updates them in place.

    Returns:
        o `[B, T, H, K]`, the log-sum-exp of the visible logits `[B, T, H]` (float32), and the next state.
    """
    window = _width(spec, window)
    options: dict[str, Any] = {"window": window, "scale": spec.scaling, "softcap": spec.softcap, "return_lse": True}
    if state is not None and is_step(q, state):
        ring = {name: state[name] for name in ("window_key", "window_value", "window_position")}
        mask = None if padding_mask is None else padding_mask[:, 0]
        o, lse = window_attention_step(q[:, 0], k[:, 0], v[:, 0], *ring.values(), key_mask=mask, **options)
        return o[:, None], lse[:, None], ring
    visible = padding_mask
    if state is not None:
        position, kept = state["window_position"], window - 1
        before = torch.arange(kept, device=k.device) >= kept - position[:, None]
        now = k.new_ones(k.shape[:2], dtype=torch.bool) if padding_mask is None else padding_mask
        visible = torch.cat([before, now], 1)
        k = torch.cat([last_tokens(state["window_key"], position, kept), k], 1)
        v = torch.cat([last_tokens(state["window_value"], position, kept), v], 1)
    o, lse = window_attention(q, k, v, key_mask=visible, cu_seqlens=cu_seqlens, **options)
    # Positions count from the first key kept here: slots depend on nothing before it.
    keys, values, position = window_cache(k, v, window, key_mask=visible)
    return o, lse, {"window_key": keys, "window_value": values, "window_position": position}


def window_bytes(spec: AttentionSpec, window: int, dtype: torch.dtype) -> int:
    """Bytes of the window's cache for one sequence."""
    return 2 * _width(spec, window) * spec.num_kv_heads * spec.head_dim * dtype.itemsize + 8


def _width(spec: AttentionSpec, window: int) -> int:
    """Never more than the teacher's own window."""
    return window if spec.sliding_window is None else min(window, spec.sliding_window)
