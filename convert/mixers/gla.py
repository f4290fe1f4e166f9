"""`gla`: gated linear attention, a data-dependent decay per key channel.

Source: GLA (arXiv 2312.06635).

    log a_t = logsigmoid(W_2 W_1 x_t + b) / 16,   S_t = diag(a_t) S_{t-1} + silu(k_t) v_tᵀ
    o_t = swish(g_t) ⊙ RMSNorm(S_tᵀ silu(q_t))                                            g low-rank

q and k are the teacher's, without RoPE unless asked. SiLU, as in `tnl`, makes most weights positive, as softmax's are;
without it the start is worse, much so in the pure form. b starts at the half-lives that the options or the teacher's
lookback give, spread over a head's channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.mixers.base import register
from linearize.convert.mixers.hybrid import DecayOptions, Hybrid, Recurrence, Tokens
from linearize.convert.mixers.parts import HeadNorm, LowRank, decay_rate, inverse_logsigmoid

TEMPERATURE = 16.0


class GLAOptions(DecayOptions):
    """Options of `gla`."""

    rank: int = Field(16, ge=1, description="rank of the decay's projection and of the output gate")
    rope: bool = Field(False, description="whether q and k carry RoPE, after their SiLU")


class GLARecurrence(Recurrence):
    """Linear attention with a vector decay."""

    def __init__(self, spec: AttentionSpec, options: GLAOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        shape = (spec.num_heads, spec.head_dim)
        self.options = options
        self.decay = LowRank(spec.hidden_size, options.rank, *shape)
        self.norm = HeadNorm(spec, "swish", options.rank)
        self.set_half_life(options.half_lives(spec.head_dim).expand(shape))

    def set_half_life(self, tokens: torch.Tensor) -> None:
        """tokens `[H, K]`."""
        self.decay.set_bias(inverse_logsigmoid(-TEMPERATURE * decay_rate(tokens)))

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        q, k = F.silu(tokens.q), F.silu(tokens.k)
        if self.options.rope:
            q, k = tokens.rotate(q, k)
        log_decay = F.logsigmoid(self.decay(tokens.x)) / TEMPERATURE
        o, memory = tokens.linear_attention(q, k, tokens.v, log_decay, state)
        return self.norm(o, tokens.x), {"memory": memory}

    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        self.set_half_life(self.options.half_lives_after(lookback, self.spec.head_dim))


@register
class GLA(Hybrid):
    """Gated linear attention: a data-dependent decay per key channel."""

    name = "gla"
    Options = GLAOptions
    recurrence_class = GLARecurrence
