"""`rwkv6`: a data-dependent decay per key channel, a bonus for the current token, token shift.

Source: RWKV-6 Finch (arXiv 2404.05892).

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ,   o_t = swish(g_t) ⊙ RMSNorm((S_{t-1} + diag(u) k_t v_tᵀ)ᵀ r_t)
    a_t = exp(-exp(w_t)),   w_t = min(low-rank(x shifted) + b, 4.4),   z shifted = z_t + (z_{t-1} - z_t) ⊙ μ_t

The token shift acts on x for the decay and on the teacher's q (= r), k and v after their projections rather than
before, so that the teacher's projections are computed once; r and k then pass through SiLU, for the same reason as in
`gla`. μ is low-rank in x for q, k, v and a constant for x, and starts at 0; u starts at 1, where o reads the token as
it stands in the state.
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
from linearize.convert.mixers.parts import HeadNorm, LowRank, decay_rate, delayed, history

FASTEST = 4.4
"""Where w is cut: exp(-exp(4.4)) is 4e-36, as good as 0. Uncut, exp(w) leaves float32 and its gradient is 0 · inf: where
the state has vanished nothing pulls w back, and the low-rank projection that channels and tokens share pushes it on."""


class RWKV6Options(DecayOptions):
    """Options of `rwkv6`."""

    rank: int = Field(16, ge=1, description="rank of the token shift, the decay's projection and the output gate")
    rope: bool = Field(False, description="whether r and k carry RoPE, after their SiLU")


class FinchRecurrence(Recurrence):
    """Linear attention with a vector decay and a bonus."""

    def __init__(self, spec: AttentionSpec, options: RWKV6Options, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        width, shape = spec.hidden_size, (spec.num_heads, spec.head_dim)
        self.options = options
        self.x_shift = nn.Parameter(torch.zeros(width))
        self.qkv_shift = LowRank(width, options.rank, spec.num_heads, 3 * spec.head_dim)
        self.decay = LowRank(width, options.rank, *shape)
        self.bonus = nn.Parameter(torch.ones(shape))
        self.norm = HeadNorm(spec, "swish", options.rank)
        self.set_half_life(options.half_lives(spec.head_dim).expand(shape))

    def set_half_life(self, tokens: torch.Tensor) -> None:
        """tokens `[H, K]`."""
        self.decay.set_bias(decay_rate(tokens).log())

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        x, qkv, shift = self._shifted(tokens, None if state is None else state["shift"])
        q, k, v = qkv.chunk(3, -1)
        q, k = F.silu(q), F.silu(k)
        if self.options.rope:
            q, k = tokens.rotate(q, k)
        log_decay = -self.decay(x).clamp_max(FASTEST).exp()
        o, memory = tokens.linear_attention(q, k, v, log_decay, state, bonus=self.bonus, scale=1.0)
        return self.norm(o, tokens.x), {"memory": memory, "shift": shift}

    def _shifted(self, tokens: Tokens, past: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x `[B, T, D]` and q, k, v `[B, T, H, 3K]` mixed with the token before, and what the next token needs."""
        qkv = torch.cat([tokens.q, tokens.k, tokens.v], -1)
        length = tokens.x.shape[1]
        longer = history(torch.cat([tokens.x, qkv.flatten(-2)], -1), past, 1)
        before = delayed(longer, 1, length, tokens.cu_seqlens)
        x_before, qkv_before = before.split([self.spec.hidden_size, qkv[0, 0].numel()], -1)
        x = torch.lerp(tokens.x, x_before, self.x_shift.to(x_before.dtype))
        qkv = torch.lerp(qkv, qkv_before.view_as(qkv), self.qkv_shift.rounded(tokens.x))
        return x, qkv, longer[:, length:].float()

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        spec = self.spec
        return {**super().state_shapes(), "shift": (1, spec.hidden_size + 3 * spec.num_heads * spec.head_dim)}

    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        self.set_half_life(self.options.half_lives_after(lookback, self.spec.head_dim))


@register
class RWKV6(Hybrid):
    """Finch: vector decay, bonus for the current token and token shift (RWKV-6)."""

    name = "rwkv6"
    Options = RWKV6Options
    recurrence_class = FinchRecurrence
