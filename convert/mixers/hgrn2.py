"""`hgrn2`: the forget gate and the key are one.

Source: HGRN2 (arXiv 2404.07904).

    a_t = lb + (1 - lb) σ(f_t),   k̂_t = 1 - a_t,   q̂_t = swish(q_t)
    S_t = diag(a_t) S_{t-1} + k̂_t v_tᵀ,   o_t = RMSNorm(S_tᵀ q̂_t)

In a conversion f comes from the teacher's key, `f = b - A_k k` with a map A_k per head, so that a channel with a large
key is written and overwrites what it held. Calibration scales A_k to channels of unit variance and centres them.
The lower bound lb starts at layer / layers, where the paper's cumulative softmax over layers starts, and is learned.
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
from linearize.convert.mixers.parts import HeadMap, HeadNorm, decay_rate

LARGEST_KEY = 1 - 1e-6  # keeps log(1 - k) finite


class HGRN2Options(DecayOptions):
    """Options of `hgrn2`."""

    rope: bool = Field(False, description="whether q and the gated key carry RoPE")


class HGRN2Recurrence(Recurrence):
    """Linear attention with a vector decay that is tied to the key."""

    def __init__(self, spec: AttentionSpec, options: HGRN2Options, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        shape = (spec.num_heads, spec.head_dim)
        self.options = options
        self.q_map, self.k_map = HeadMap(*shape), HeadMap(*shape)
        self.forget_bias = nn.Parameter(torch.zeros(shape))
        bound = min(max(layer / layers, 0.01), 0.99)
        self.lower_bound = nn.Parameter(torch.full(shape, bound).logit())
        self.norm = HeadNorm(spec)
        self.set_half_life(options.half_lives(spec.head_dim).expand(shape))

    @torch.no_grad()
    def set_half_life(self, tokens: torch.Tensor) -> None:
        """tokens `[H, K]`: the half-life where the mapped key is 0."""
        forget = -torch.expm1(-decay_rate(tokens.to(self.forget_bias)))
        share = forget / (1 - self.lower_bound.sigmoid())
        self.forget_bias.copy_(-share.clamp_max(0.9).logit())

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        q = F.silu(self.q_map(tokens.q))
        f = self.forget_bias - self.k_map(tokens.k)
        k = ((1 - self.lower_bound.sigmoid()) * torch.sigmoid(-f)).clamp_max(LARGEST_KEY)
        k, log_decay = k.to(q.dtype), torch.log1p(-k)
        if self.options.rope:
            q, k = tokens.rotate(q, k)
        o, memory = tokens.linear_attention(q, k, tokens.v, log_decay, state)
        return self.norm(o, tokens.x), {"memory": memory}

    @torch.no_grad()
    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        mean, deviation = tokens.k.mean((0, 1)), tokens.k.std((0, 1)).clamp_min(1e-3)
        self.k_map.weight.copy_(torch.diag_embed(1 / deviation))
        self.set_half_life(self.options.half_lives_after(lookback, self.spec.head_dim))
        self.forget_bias.add_(mean / deviation)


@register
class HGRN2(Hybrid):
    """Linear attention whose key is one minus its forget gate (HGRN2)."""

    name = "hgrn2"
    Options = HGRN2Options
    recurrence_class = HGRN2Recurrence
