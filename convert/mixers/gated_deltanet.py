"""`gated-deltanet`: the delta rule with a data-dependent decay per head.

Source: Gated DeltaNet (arXiv 2412.06464).

    a_t = exp(-e^{A_log} softplus(w x_t + b))                                                        one per head
    S_t = a_t S_{t-1} + β_t k̂_t (v̂_t - a_t S_{t-1}ᵀ k̂_t)ᵀ,   o_t = swish(g_t) ⊙ RMSNorm(S_tᵀ q̂_t)   g low-rank

q̂, k̂, v̂ and β as in `deltanet`. b starts at the half-life that the options give; without one, calibration tries the
teacher's lookback and shorter ones, then β, head by head.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.mixers.base import register
from linearize.convert.mixers.deltanet import DeltaOptions, DeltaRule
from linearize.convert.mixers.hybrid import DecayOptions, Hybrid, Tokens
from linearize.convert.mixers.parts import HeadNorm, Linear, decay_rate, inverse_softplus
from linearize.kernels.gate_prep import softplus_gate


class GatedDeltaOptions(DecayOptions, DeltaOptions):
    """Options of `gated-deltanet`."""

    rank: int = Field(16, ge=1, description="rank of the output gate")


class GatedDeltaRule(DeltaRule):
    """The delta rule with a decay per head and a swish gate."""

    def __init__(self, spec: AttentionSpec, options: GatedDeltaOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        self.options = options
        self.step = Linear(spec.hidden_size, spec.num_heads)
        self.A_log = nn.Parameter(torch.zeros(spec.num_heads))
        self.norm = HeadNorm(spec, "swish", options.rank)
        nn.init.zeros_(self.step.weight)
        with torch.no_grad():
            self.step.bias.copy_(inverse_softplus(decay_rate(options.half_lives(spec.num_heads))))

    def log_decay(self, tokens: Tokens) -> torch.Tensor:
        return softplus_gate(self.step.product(tokens.x), self.A_log, self.step.bias)[0]

    def starts(self, tokens: Tokens, lookback: torch.Tensor) -> list[list[dict[str, torch.Tensor]]]:
        half_lives = self.options.half_lives_to_try(lookback, 1)
        decays = [{"step.bias": inverse_softplus(decay_rate(half_life[:, 0]))} for half_life in half_lives]
        return [decays, *super().starts(tokens, lookback)]


@register
class GatedDeltaNet(Hybrid):
    """The delta rule with a data-dependent decay per head (Gated DeltaNet)."""

    name = "gated-deltanet"
    Options = GatedDeltaOptions
    recurrence_class = GatedDeltaRule
