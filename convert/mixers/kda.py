"""`kda`: the delta rule with a data-dependent decay per key channel.

Source: Kimi Linear (arXiv 2510.26692), Kimi Delta Attention.

    a_t = exp(-e^{A_log} softplus(W_2 W_1 x_t + b))                         one per head and key channel, A_log per head
    S_t = diag(a_t) S_{t-1} + β_t k̂_t (v̂_t - S_{t-1}ᵀ diag(a_t) k̂_t)ᵀ,   o_t = σ(g_t) ⊙ RMSNorm(S_tᵀ q̂_t)   g low-rank

q̂, k̂, v̂ and β as in `deltanet`. b starts at half-lives spread over a head's channels around the one that the options
give; without one, calibration tries the teacher's lookback and shorter ones, then β, head by head.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.mixers.base import register
from linearize.convert.mixers.deltanet import DeltaOptions, DeltaRule
from linearize.convert.mixers.hybrid import DecayOptions, Hybrid, Tokens
from linearize.convert.mixers.parts import HeadNorm, LowRank, decay_rate, inverse_softplus
from linearize.kernels.gate_prep import softplus_gate


class KDAOptions(DecayOptions, DeltaOptions):
    """Options of `kda`."""

    rank: int = Field(16, ge=1, description="rank of the decay's projection and of the output gate")


class KimiDeltaRule(DeltaRule):
    """The delta rule with a decay per key channel and a sigmoid gate."""

    def __init__(self, spec: AttentionSpec, options: KDAOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        shape = (spec.num_heads, spec.head_dim)
        self.options = options
        self.step = LowRank(spec.hidden_size, options.rank, *shape)
        self.A_log = nn.Parameter(torch.zeros(spec.num_heads))
        self.norm = HeadNorm(spec, "sigmoid", options.rank)
        self.step.set_bias(inverse_softplus(decay_rate(options.half_lives(spec.head_dim).expand(shape))))

    def log_decay(self, tokens: Tokens) -> torch.Tensor:
        return softplus_gate(self.step.product(tokens.x), self.A_log, self.step.bias)[0]

    def starts(self, tokens: Tokens, lookback: torch.Tensor) -> list[list[dict[str, torch.Tensor]]]:
        half_lives = self.options.half_lives_to_try(lookback, self.spec.head_dim)
        decays = [{"step.up.bias": inverse_softplus(decay_rate(half_life))} for half_life in half_lives]
        return [decays, *super().starts(tokens, lookback)]


@register
class KDA(Hybrid):
    """The delta rule with a data-dependent decay per key channel (Kimi Delta Attention)."""

    name = "kda"
    Options = KDAOptions
    recurrence_class = KimiDeltaRule
