"""`retnet`: retention, one constant decay per head.

Source: RetNet (arXiv 2307.08621).

    S_t = a_h S_{t-1} + k̂_t v_tᵀ,   o_t = swish(g_t) ⊙ RMSNorm(S_tᵀ q̂_t)      q̂, k̂ = RoPE(silu(q, k)); g low-rank

SiLU is not RetNet's; it stands for the same reason as in `gla`. The decays start at RetNet's `a_h = 1 - 2^{-5-h}` and are learned; a teacher's heads have no order, so calibration
gives the slower decays to the heads that look back farther.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.mixers.base import register
from linearize.convert.mixers.hybrid import Hybrid, HybridOptions, Recurrence, Tokens
from linearize.convert.mixers.parts import ConstantDecay, HeadNorm


class RetNetOptions(HybridOptions):
    """Options of `retnet`."""

    rank: int = Field(16, ge=1, description="rank of the output gate")
    rope: bool = Field(True, description="whether q and k carry RoPE, after their SiLU")


class Retention(Recurrence):
    """Linear attention with a constant decay per head."""

    def __init__(self, spec: AttentionSpec, options: RetNetOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        self.rope = options.rope
        self.decay = ConstantDecay(-torch.log1p(-(2.0 ** (-5 - torch.arange(spec.num_heads)))))
        self.norm = HeadNorm(spec, "swish", options.rank)

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        q, k = F.silu(tokens.q), F.silu(tokens.k)
        if self.rope:
            q, k = tokens.rotate(q, k)
        o, memory = tokens.linear_attention(q, k, tokens.v, self.decay(), state)
        return self.norm(o, tokens.x), {"memory": memory}

    @torch.no_grad()
    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        self.decay.order(lookback)


@register
class RetNet(Hybrid):
    """Retention: linear attention with one constant decay per head (RetNet)."""

    name = "retnet"
    Options = RetNetOptions
    recurrence_class = Retention
