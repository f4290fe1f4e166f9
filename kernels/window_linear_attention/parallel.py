"""The window's and the rest's parts of one normaliser, and how they join, in plain torch.

A key enters the linear sums when it leaves the window, `window` tokens late. So query t of T and key t + S − T − window
make a pair of linear attention: views of the queries without the first ones and of the keys without the last ones,
nothing is copied. Packed sequences are cut between the two: pairs whose key belongs to an earlier sequence than the
query stand in sequences of their own, whose outputs are dropped.

Suffixes: B batch, T queries, S keys, H query heads, K and V widths, F features; P = S − window pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.kernels.linear_attention import linear_attention
from linearize.kernels.window_attention import window_attention
from linearize.kernels.window_linear_attention.reference import LARGEST_EXPONENT


@dataclass(frozen=True)
class Branches:
    """What the join takes.

    Attributes:
        numerator: [B, P, H, V] linear sums of the last P queries, and of no other.
        denominator: [B, P, H] the same without the values.
        inside: [B, T, H, V] the window's output; lse: [B, T, H] its log-sum-exp.
        begin: [T] int32, where the packed sequence of each token begins, or None. A token nearer to it than `window`
            has no rest, whatever the sums say.
        window: keys in the window.
        state: (memory [B, H, F, V], normaliser [B, H, F]).
    """

    numerator: Tensor
    denominator: Tensor
    inside: Tensor
    lse: Tensor
    begin: Tensor | None
    window: int
    state: tuple[Tensor, Tensor]


def branches(
    q_BTHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    phi_q_BTHF: Tensor,
    phi_k_BPHF: Tensor,
    *,
    window: int,
    scale: float | None = None,
    softcap: float | None = None,
    key_mask_BS: Tensor | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Branches:
    """Both parts; `backend` is that of the kernels they are made of."""
    T, H, S = q_BTHK.shape[1], q_BTHK.shape[2], k_BSHK.shape[1]
    window = max(1, min(window, S))
    attended = window_attention(
        q_BTHK,
        k_BSHK,
        v_BSHV,
        window=window,
        scale=scale,
        softcap=softcap,
        key_mask=key_mask_BS,
        cu_seqlens=cu_seqlens,
        return_lse=True,
        backend=backend,
    )
    inside, lse = attended
    P = max(0, S - window)
    phi_q, phi_k, v = phi_q_BTHF[:, T - P :], phi_k_BPHF[:, :P], v_BSHV[:, :P]
    if key_mask_BS is not None:
        phi_k = phi_k * key_mask_BS[:, :P, None, None]
    phi_k, v = (x if x.shape[2] == H else x.repeat_interleave(H // x.shape[2], 2) for x in (phi_k, v))
    begin = pairs = None
    if cu_seqlens is not None:
        begin = sequence_starts(cu_seqlens, T)
        pairs = pair_boundaries(cu_seqlens, window)
    numerator, denominator, state = _sums(phi_q, phi_k, v, initial_state, pairs, backend)
    if pairs is not None:
        state = (state[0][::2], state[1][::2])
    return Branches(numerator, denominator, inside, lse, begin, window, state)


def sequence_starts(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[T] int32: where the sequence of each packed token begins."""
    bounds = cu_seqlens.to(torch.int32)
    index = torch.arange(tokens, dtype=torch.int32, device=bounds.device)
    return bounds[torch.searchsorted(bounds, index, right=True) - 1]


def pair_boundaries(cu_seqlens: Tensor, window: int) -> Tensor:
    """[2N + 1] boundaries of N packed sequences' pairs, each followed by the pairs across its end."""
    total = cu_seqlens[-1] - window
    starts = torch.minimum(cu_seqlens, total)
    ends = torch.maximum(torch.minimum(cu_seqlens[1:] - window, total), starts[:-1])
    return torch.cat([torch.stack([starts[:-1], ends], 1).flatten(), starts[-1:]])


def _sums(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    initial_state: tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Linear sums with and without values. Sums over many tokens leave float16's range: that runs in float32."""
    memory, normaliser = (None, None) if initial_state is None else initial_state
    phi_q, phi_k, v = (x.float() if x.dtype == torch.float16 else x for x in (phi_q, phi_k, v))
    options: dict[str, Any] = {"scale": 1.0, "output_final_state": True, "cu_seqlens": cu_seqlens, "backend": backend}
    with torch.autocast(v.device.type, enabled=False):
        if backend == "triton":
            numerator, memory = linear_attention(phi_q, phi_k, v, initial_state=memory, **options)
            ones = v.new_ones(1, 1, 1, 1).expand(*v.shape[:3], 1)
            start = None if normaliser is None else normaliser[..., None]
            denominator, column = linear_attention(phi_q, phi_k, ones, initial_state=start, **options)
            assert memory is not None and column is not None
            return numerator, denominator[..., 0], (memory, column[..., 0])
        # One product with a column of ones is cheaper than two where nothing is cut into tiles.
        if memory is not None and normaliser is not None:
            memory = torch.cat([memory, normaliser[..., None]], -1)
        wide = torch.promote_types(v.dtype, torch.float32)
        both, memory = linear_attention(
            phi_q, phi_k, F.pad(v.to(wide), (0, 1), value=1.0), initial_state=memory, **options
        )
    assert memory is not None
    return both[..., :-1], both[..., -1], (memory[..., :-1], memory[..., -1])


def join(parts: Branches, mix_H: Tensor, shift: str) -> Tensor:
    """The window's part has weight e^x, x = −mix or lse − mix: [B, T, H, V] in the sums' dtype."""
    numerator, denominator = parts.numerator, parts.denominator
    tokens, T = numerator.shape[1], parts.inside.shape[1]
    if parts.begin is not None:
        index = torch.arange(T - tokens, T, device=numerator.device)
        alone = index - parts.begin[T - tokens :] < parts.window
        numerator = numerator.masked_fill(alone[:, None, None], 0)
        denominator = denominator.masked_fill(alone[:, None], 0)
    numerator = F.pad(numerator, (0, 0, 0, 0, T - tokens, 0))
    denominator = F.pad(denominator, (0, 0, T - tokens, 0))[..., None]
    weight = window_weight(parts.lse, mix_H, shift)[..., None]
    inside = parts.inside.to(weight.dtype)
    return inside + (numerator - denominator * inside) / (denominator + weight)


def window_weight(lse: Tensor, mix_H: Tensor, shift: str) -> Tensor:
    """e^x of every query and head, x kept inside ±60."""
    exponent = -mix_H.to(lse.dtype)
    exponent = lse + exponent if shift == "none" else exponent.expand_as(lse)
    return exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp()
