"""`tnl`: TransNormerLLM's Lightning attention, one constant decay per head.

Source: TransNormerLLM (arXiv 2307.14995), Lightning Attention-2 (arXiv 2401.04658).

    S_t = a_h S_{t-1} + silu(k_t) silu(v_t)ᵀ,   o_t = σ(g_t) ⊙ RMSNorm(S_tᵀ silu(q_t))       g low-rank
    a_h = exp(-s_h (1 - l/(L-1) + 1e-5)),   s_h = 2^{-8(h+1)/H}                              layer l of L

The decays start there and are learned; calibration gives the slower ones to the heads that look back farther.
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


class TNLOptions(HybridOptions):
    """Options of `tnl`."""

    rank: int = Field(16, ge=1, description="rank of the output gate")
    value_silu: bool = Field(True, description="whether v passes through SiLU too, as in TNL")
    rope: bool = Field(False, description="whether q and k carry RoPE, after their SiLU")


def lightning_rates(heads: int, layer: int, layers: int) -> torch.Tensor:
    """`-log a_h` `[heads]` of a layer."""
    slopes = 2.0 ** (-8 * (torch.arange(heads) + 1) / heads)
    return slopes * (1 - layer / max(layers - 1, 1) + 1e-5)


class LightningRecurrence(Recurrence):
    """Linear attention with a constant decay per head on SiLU features."""

    def __init__(self, spec: AttentionSpec, options: TNLOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        self.options = options
        self.decay = ConstantDecay(lightning_rates(spec.num_heads, layer, layers))
        self.norm = HeadNorm(spec, "sigmoid", options.rank)

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        q, k = F.silu(tokens.q), F.silu(tokens.k)
        if self.options.rope:
            q, k = tokens.rotate(q, k)
        v = F.silu(tokens.v) if self.options.value_silu else tokens.v
        o, memory = tokens.linear_attention(q, k, v, self.decay(), state)
        return self.norm(o, tokens.x), {"memory": memory}

    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        self.decay.order(lookback)


@register
class TNL(Hybrid):
    """Lightning attention: SiLU features and a constant decay per head (TransNormerLLM)."""

    name = "tnl"
    Options = TNLOptions
    recurrence_class = LightningRecurrence
