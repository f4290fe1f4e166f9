"""`cosformer2`: linear attention without decay whose positions turn with a cosine.

Source: cosFormer2 as in the linear scaling laws (arXiv 2406.16690), after cosFormer (arXiv 2202.08791) and LRPE
(arXiv 2307.09270).

    S_t = S_{t-1} + lrpe(silu(k_t)) v_tᵀ,   o_t = σ(g_t) ⊙ RMSNorm(S_tᵀ lrpe(silu(q_t)))      g low-rank
    lrpe(x)_t = [x cos tθ, x sin tθ],   θ_i = 10000^{-2i/K} for the first half of the channels, 0 for the rest

so q and k meet as `Σ_i q_i k_i cos((t-s) θ_i)`. Where θ is 0 the sine half is 0 and is left out: 3K/2 channels. The
position is counted in the state, over real tokens. TPE, a position term after the embedding, is no part of a
conversion: the teacher's embedding stays as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.mixers.base import register
from linearize.convert.mixers.hybrid import Hybrid, HybridOptions, Recurrence, Tokens
from linearize.convert.mixers.parts import HeadNorm, position_in_sequence


class CosFormer2Options(HybridOptions):
    """Options of `cosformer2`."""

    rank: int = Field(16, ge=1, description="rank of the output gate")


class CosineRecurrence(Recurrence):
    """Linear attention on SiLU features with LRPE."""

    def __init__(self, spec: AttentionSpec, options: CosFormer2Options, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        self.norm = HeadNorm(spec, "sigmoid", options.rank)

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        position, count = _positions(tokens, None if state is None else state["count"])
        q, k = lrpe(F.silu(tokens.q), position), lrpe(F.silu(tokens.k), position)
        o, memory = tokens.linear_attention(q, k, tokens.v, None, state)
        return self.norm(o, tokens.x), {"memory": memory, "count": count}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        heads, width = self.spec.num_heads, self.spec.head_dim
        return {"memory": (heads, width + width // 2, width), "count": (1,)}


def lrpe(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """x `[B, T, H, K]`, position `[B, T]` -> `[B, T, H, K + K // 2]`."""
    width, half = x.shape[-1], x.shape[-1] // 2
    theta = 10000.0 ** (-2 * torch.arange(half, device=x.device) / width)
    angle = position[..., None, None] * theta
    turning, still = x[..., :half], x[..., half:]
    return torch.cat([turning * angle.cos().to(x.dtype), still, turning * angle.sin().to(x.dtype)], -1)


def _positions(tokens: Tokens, count: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Position `[B, T]` of every token among the real ones, and how many were read `[B, 1]`; float32 is exact
    up to 16 million."""
    batch, length = tokens.x.shape[:2]
    if tokens.cu_seqlens is not None:
        position = position_in_sequence(length, tokens.cu_seqlens)[None].float()
        return position, position[:, -1:] + 1
    real = tokens.x.new_ones(batch, length, dtype=torch.float32) if tokens.mask is None else tokens.mask.float()
    read = real.cumsum(1) if count is None else real.cumsum(1) + count
    return read - 1, read[:, -1:]


@register
class CosFormer2(Hybrid):
    """Linear attention with cosine-turning positions and no decay (cosFormer2)."""

    name = "cosformer2"
    Options = CosFormer2Options
    recurrence_class = CosineRecurrence
