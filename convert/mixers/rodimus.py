"""`rodimus`: data-dependent tempered selection (DDTS), multi-head, on the teacher's own q, k, v and o.

Source: Rodimus* (arXiv 2410.06577), the DDTS gates and recurrence; every query head has gates of its own, one
per key channel, and a softmax window stands beside the recurrence, which adds what the window cannot see:

    x'      = SiLU(conv(x))                           causal, depthwise, 4 taps, starting as the identity
    [a, b]  = up(down(x')) + bias                     per head and key channel, float32
    log α   = -softplus(a) · σ(b)                     log decay, ≤ 0
    q̃, k̃    = SiLU(A_q q + a_q),  SiLU(A_k k + a_k)   per head, A and a starting as q and k (before RoPE)
    k̂       = k̃ / ‖k̃‖ ⊙ softplus(a)^σ(b)              input gate, computed in log space
    S_t     = diag(α_t) S_{t-1} + k̂_t (β̂_t ⊙ v_t)ᵀ    value gate β̂ = σ(low-rank(x))
    y_t     = K^-½ S_tᵀ q̃_t + d ⊙ v_t                 feedthrough d per head and channel

SiLU is not the paper's; as in `gla` it makes most weights positive, as softmax's are. Without it (`silu: false`) a
model that is trained from scratch hardly learns to recall (docs/mqar.md). The window joins as in `hybrid.py`, which
also has s.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.calibration import least_squares
from linearize.convert.mixers.base import register
from linearize.convert.mixers.hybrid import DecayOptions, Hybrid, Recurrence, Tokens
from linearize.convert.mixers.parts import CausalConv, HeadMap, LowRank, decay_rate, inverse_softplus
from linearize.kernels.gate_prep import ddts_gates


class RodimusOptions(DecayOptions):
    """Options of `rodimus`."""

    rank: int = Field(16, ge=1, description="rank of the gate projections")
    conv: int = Field(4, ge=1, description="taps of the short convolution before the gates")
    half_life: float | None = Field(
        None,
        gt=0,
        description="initial half-life of the state in tokens; none: 64 beside a window, 16 without",
    )
    rope: bool = Field(False, description="whether q and k of the recurrence carry RoPE")
    silu: bool = Field(True, description="whether q̃ and k̃ pass through SiLU, which makes most weights positive")


class DDTSGates(nn.Module):
    """Log decay, gated key and value gate."""

    def __init__(self, spec: AttentionSpec, options: RodimusOptions) -> None:
        super().__init__()
        width, shape = spec.hidden_size, (spec.num_heads, spec.head_dim)
        self.activation: Literal["silu"] | None = "silu" if options.silu else None
        self.conv = CausalConv(width, options.conv, bias=False)
        self.key = LowRank(width, options.rank, 2 * spec.num_heads, spec.head_dim)
        self.value = LowRank(width, options.rank, *shape)
        self.set_half_life(options.half_lives(spec.head_dim).expand(shape))

    def set_half_life(self, tokens: torch.Tensor) -> None:
        """Bias the gates so that the state's rows halve in `tokens` `[H, K]` tokens (at temperature 1/2)."""
        a = inverse_softplus(2 * decay_rate(tokens))
        self.key.set_bias(torch.cat([a, torch.zeros_like(a)]))

    def forward(
        self, x: torch.Tensor, k: torch.Tensor, past: torch.Tensor | None, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x `[B, T, D]`, k `[B, T, H, K]` -> log decay (float32), gated key and value gate of k's shape, conv state."""
        convolved, past = self.conv(x, past, cu_seqlens, activation="silu")
        (a, b), (a_bias, b_bias) = self.key.product(convolved).chunk(2, 2), self.key.bias.chunk(2)
        log_decay, k = ddts_gates(a, b, k, a_bias=a_bias, b_bias=b_bias, activation=self.activation)
        return log_decay, k, torch.sigmoid(self.value.rounded(x)), past


class DDTS(Recurrence):
    """Linear attention with a vector decay and tempered input gates."""

    def __init__(self, spec: AttentionSpec, options: RodimusOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        shape = (spec.num_heads, spec.head_dim)
        self.options = options
        self.gates = DDTSGates(spec, options)
        self.q_map, self.k_map = HeadMap(*shape, bias=True), HeadMap(*shape, bias=True)
        self.feedthrough = nn.Parameter(torch.zeros(shape))

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        o, new_state = self.scan(tokens, state)
        return o + self.feedthrough.to(o.dtype) * tokens.v, new_state

    def scan(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        """The state's output `[B, T, H, V]`, and the next state."""
        q, k = tokens.rotate(tokens.q, tokens.k) if self.options.rope else (tokens.q, tokens.k)
        q = F.silu(self.q_map(q)) if self.options.silu else self.q_map(q)
        past = None if state is None else state["conv"]
        log_decay, k, value_gate, past = self.gates(tokens.x, self.k_map(k), past, tokens.cu_seqlens)
        o, memory = tokens.linear_attention(q, k, tokens.v * value_gate, log_decay, state)
        return o, {"memory": memory, "conv": past}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().state_shapes(), "conv": (self.options.conv - 1, self.spec.hidden_size)}

    @torch.no_grad()
    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        if not self.options.window:
            on_state, on_value = least_squares([self.scan(tokens, None)[0], tokens.v], heads).unbind(-1)
            self.feedthrough.copy_((on_value / on_state)[:, None].expand_as(self.feedthrough))


@register
class Rodimus(Hybrid):
    """Vector-decay linear attention with DDTS gates (Rodimus)."""

    name = "rodimus"
    Options = RodimusOptions
    recurrence_class = DDTS
