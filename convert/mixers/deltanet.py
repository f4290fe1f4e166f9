"""`deltanet`: a state that replaces what it holds under a key instead of adding to it.

Source: DeltaNet, chunked by Yang et al. 2024 (arXiv 2406.06484).

    q̂, k̂ = normalise(SiLU(A_q conv(q))), normalise(SiLU(A_k conv(k)));   v̂ = conv(v);   β_t = σ(w x_t + b)
    S_t = S_{t-1} + β_t k̂_t (v̂_t - S_{t-1}ᵀ k̂_t)ᵀ,   o_t = RMSNorm(S_tᵀ q̂_t)

q, k, v are the teacher's. The convolution is causal, depthwise and starts as the identity, as do the maps A of each
head. SiLU makes most weights of a query positive, as softmax's are; without it the start is worse. Calibration gives
every head the b that brings it nearest to the teacher's: with much written at every token, the state forgets fast.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.mixers.base import register
from linearize.convert.mixers.hybrid import Hybrid, HybridOptions, Recurrence, Tokens
from linearize.convert.mixers.parts import CausalConv, HeadMap, HeadNorm, Linear, is_step
from linearize.kernels.delta_rule import delta_rule, delta_rule_step

WRITING_STRENGTHS = (0.02, 0.1, 0.3, 0.8)
"""The β that calibration tries."""


class DeltaOptions(HybridOptions):
    """Options of every delta rule."""

    conv: int = Field(4, ge=0, description="taps of the short convolution of q, k and v; 0 drops it")
    rope: bool = Field(False, description="whether q and k carry RoPE")


class DeltaRule(Recurrence):
    """Short convolution, normalised q and k, writing strength and the kernel. A subclass adds a decay and a gate."""

    def __init__(self, spec: AttentionSpec, options: DeltaOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        shape = (spec.num_heads, spec.head_dim)
        self.short_conv, self.rope = options.conv, options.rope
        self.conv = CausalConv(3 * spec.num_heads * spec.head_dim, options.conv) if options.conv else None
        self.q_map, self.k_map = HeadMap(*shape), HeadMap(*shape)
        self.strength = Linear(spec.hidden_size, spec.num_heads)
        nn.init.zeros_(self.strength.weight)
        nn.init.constant_(self.strength.bias, _logit(0.1))
        self.norm = HeadNorm(spec)

    def log_decay(self, tokens: Tokens) -> torch.Tensor | None:
        """`[B, T, H]` or `[B, T, H, K]`; None for no decay."""
        return None

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        q, k, v = tokens.q, tokens.k, tokens.v
        new_state: State = {}
        if self.conv is not None:
            qkv = torch.cat([q, k, v], -1)
            past = None if state is None else state["conv"]
            flat, new_state["conv"] = self.conv(qkv.flatten(-2), past, tokens.cu_seqlens)
            q, k, v = flat.view_as(qkv).chunk(3, -1)
        q, k = self.q_map(q), self.k_map(k)
        if self.rope:
            q, k = tokens.rotate(q, k)
        q, k = (F.normalize(F.silu(x), dim=-1, eps=1e-6) for x in (q, k))
        strength, log_decay = self.strength(tokens.x).sigmoid(), self.log_decay(tokens)
        if tokens.mask is not None:  # padding neither writes nor decays
            strength = strength * tokens.mask[..., None]
            log_decay = None if log_decay is None else tokens.masked(log_decay)
        if state is not None and is_step(q, state):
            decay = None if log_decay is None else log_decay[:, 0]
            o = delta_rule_step(q[:, 0], k[:, 0], v[:, 0], strength[:, 0], state["memory"], decay, scale=1.0)[:, None]
            return self.norm(o, tokens.x), {"memory": state["memory"], **new_state}
        o, memory = delta_rule(
            q,
            k,
            v,
            strength,
            log_decay,
            scale=1.0,
            initial_state=None if state is None else state["memory"],
            output_final_state=True,
            cu_seqlens=tokens.cu_seqlens,
        )
        assert memory is not None
        return self.norm(o, tokens.x), {"memory": memory, **new_state}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().state_shapes()
        if self.conv is not None:
            shapes["conv"] = (self.short_conv - 1, 3 * self.spec.num_heads * self.spec.head_dim)
        return shapes

    def starts(self, tokens: Tokens, lookback: torch.Tensor) -> list[list[dict[str, torch.Tensor]]]:
        return [[{"strength.bias": torch.full_like(lookback, _logit(beta))} for beta in WRITING_STRENGTHS]]


def _logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


@register
class DeltaNet(Hybrid):
    """The delta rule: what the state holds under a key is replaced by the new value (DeltaNet)."""

    name = "deltanet"
    Options = DeltaOptions
    recurrence_class = DeltaRule
