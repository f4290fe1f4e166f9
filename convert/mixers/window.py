"""The softmax window that stands beside every recurrent mixer, with its own small cache."""

from __future__ import annotations

import torch

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.kernels.window_attention import window_attention


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
        state: holds `window_key`, `window_value` `[B, W-1, H_kv, K]` and `window_mask` `[B, W-1]`.

    Returns:
        o `[B, T, H, K]`, the log-sum-exp of the visible logits `[B, T, H]` (float32), and the next state.
    """
    if spec.sliding_window is not None:
        window = min(window, spec.sliding_window)
    batch, tokens = q.shape[:2]
    mask = padding_mask if padding_mask is not None else torch.ones(batch, tokens, dtype=torch.bool, device=q.device)
    keys, values, visible = k, v, mask
    if state is not None:
        keys = torch.cat([state["window_key"], k], 1)
        values = torch.cat([state["window_value"], v], 1)
        visible = torch.cat([state["window_mask"], mask], 1)
    o, lse = window_attention(
        q,
        keys,
        values,
        window=window,
        scale=spec.scaling,
        softcap=spec.softcap,
        key_mask=visible if padding_mask is not None or state is not None else None,
        cu_seqlens=cu_seqlens,
        return_lse=True,
    )
    kept = window - 1
    new_state = {
        "window_key": _last(keys, kept),
        "window_value": _last(values, kept),
        "window_mask": _last(visible, kept),
    }
    return o, lse, new_state


def window_bytes(spec: AttentionSpec, window: int, dtype: torch.dtype) -> int:
    """Bytes of the window's cache for one sequence."""
    if spec.sliding_window is not None:
        window = min(window, spec.sliding_window)
    return (window - 1) * (2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize + 1)


def _last(x: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` entries along time, zeros (False) in front where there are fewer."""
    missing = count - x.shape[1]
    if missing > 0:
        x = torch.cat([x.new_zeros(x.shape[0], missing, *x.shape[2:]), x], 1)
    return x[:, x.shape[1] - count :]
