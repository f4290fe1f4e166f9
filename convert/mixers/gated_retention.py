"""`gated-retention`: retention with one data-dependent decay per head.

Source: YOCO (arXiv 2405.05254).

    a_t = σ(x_t W_γ + b)^{1/16},   S_t = a_t S_{t-1} + k̂_t v_tᵀ,   o_t = swish(g_t) ⊙ RMSNorm(S_tᵀ q̂_t)

q̂ and k̂ are RoPE of silu(q) and silu(k), SiLU for the same reason as in `gla`; g is low-rank. b starts at the half-lives that the options or the teacher's lookback give.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.mixers.base import register
from linearize.convert.mixers.hybrid import DecayOptions, Hybrid, Recurrence, Tokens
from linearize.convert.mixers.parts import HeadNorm, Linear, decay_rate, inverse_logsigmoid

TEMPERATURE = 16.0


class GatedRetentionOptions(DecayOptions):
    """Options of `gated-retention`."""

    rank: int = Field(16, ge=1, description="rank of the output gate")
    rope: bool = Field(True, description="whether q and k carry RoPE, after their SiLU")


class GatedRetentionRecurrence(Recurrence):
    """Linear attention with a scalar decay per head and token."""

    def __init__(self, spec: AttentionSpec, options: GatedRetentionOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        self.options = options
        self.decay = Linear(spec.hidden_size, spec.num_heads)
        nn.init.zeros_(self.decay.weight)
        self.norm = HeadNorm(spec, "swish", options.rank)
        self.set_half_life(options.half_lives(spec.num_heads))

    @torch.no_grad()
    def set_half_life(self, tokens: torch.Tensor) -> None:
        """tokens `[H]`."""
        self.decay.bias.copy_(inverse_logsigmoid(-TEMPERATURE * decay_rate(tokens)))

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        q, k = F.silu(tokens.q), F.silu(tokens.k)
        if self.options.rope:
            q, k = tokens.rotate(q, k)
        log_decay = F.logsigmoid(self.decay(tokens.x)) / TEMPERATURE
        o, memory = tokens.linear_attention(q, k, tokens.v, log_decay, state)
        return self.norm(o, tokens.x), {"memory": memory}

    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        self.set_half_life(self.options.half_lives_after(lookback, 1)[:, 0])


@register
class GatedRetention(Hybrid):
    """Retention with a data-dependent scalar decay per head (YOCO)."""

    name = "gated-retention"
    Options = GatedRetentionOptions
    recurrence_class = GatedRetentionRecurrence
