"""`gsa`: softmax attention over a fixed number of slots, which hold decaying sums of keys and of values.

Source: Gated Slot Attention (arXiv 2409.07146).

    log f_t = logsigmoid(b - W k_t) / 16,   s_t = 1 - f_t                                    one per head and slot
    K̃_t = diag(f_t) K̃_{t-1} + s_t k_tᵀ,   Ṽ_t = diag(f_t) Ṽ_{t-1} + s_t v_tᵀ
    o_t = swish(g_t) ⊙ RMSNorm(Ṽ_tᵀ softmax(K̃_t A_q q_t · scaling))                          g low-rank

In a conversion f comes from the teacher's key, as in `hgrn2`, so that a slot takes in keys of one kind. v stays as
the teacher projects it, without the paper's SiLU. Calibration sets every slot's row of W to a key of the text, relative
to the mean key; then, head by head, b to the best of several half-lives, spread over the slots, and A_q to the best of
several multiples of the identity: a mean of keys is shorter than a key.
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
from linearize.convert.mixers.parts import HeadMap, HeadNorm, decay_rate, inverse_logsigmoid, is_step
from linearize.kernels.slot_attention import slot_attention, slot_attention_step

TEMPERATURE = 16.0
ENTRY = 3.0
"""Standard deviation of W k over a text."""


class GSAOptions(DecayOptions):
    """Options of `gsa`."""

    slots: int = Field(64, ge=2, description="slots of each head")
    rank: int = Field(16, ge=1, description="rank of the output gate")
    rope: bool = Field(False, description="whether q and the keys in the slots carry RoPE")


class GatedSlots(Recurrence):
    """Slots that tokens enter by their keys, and the attention over them."""

    def __init__(self, spec: AttentionSpec, options: GSAOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        shape = (spec.num_heads, spec.head_dim)
        self.options = options
        # Slots that began alike would receive one gradient and stay alike.
        self.entry = nn.Parameter(
            ENTRY * spec.head_dim**-0.5 * torch.randn(spec.num_heads, options.slots, spec.head_dim)
        )
        self.forget_bias = nn.Parameter(_forget_bias(options.half_lives(options.slots)).repeat(spec.num_heads, 1))
        self.q_map = HeadMap(*shape)
        self.norm = HeadNorm(spec, "swish", options.rank)

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        forget = self.forget_bias - torch.einsum("bthk,hmk->bthm", tokens.k, self.entry.to(tokens.k.dtype))
        log_decay = F.logsigmoid(forget) / TEMPERATURE
        if tokens.mask is not None:
            log_decay = log_decay * tokens.mask[..., None, None]
        taken = -torch.expm1(log_decay)
        q, k = self.q_map(tokens.q), tokens.k
        if self.options.rope:
            q, k = tokens.rotate(q, k)
        before = None if state is None else (state["slot_keys"], state["slot_values"])
        if state is not None and before is not None and is_step(q, state):
            q, k, v, taken, log_decay = (t[:, 0] for t in (q, k, tokens.v, taken, log_decay))
            o = slot_attention_step(q, k, v, taken, log_decay, before, scale=self.spec.scaling)[:, None]
            return self.norm(o, tokens.x), state
        o, slots = slot_attention(
            q,
            k,
            tokens.v,
            taken,
            log_decay,
            scale=self.spec.scaling,
            initial_state=before,
            output_final_state=True,
            cu_seqlens=tokens.cu_seqlens,
        )
        assert slots is not None
        return self.norm(o, tokens.x), {"slot_keys": slots[0], "slot_values": slots[1]}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        shape = (self.spec.num_heads, self.options.slots, self.spec.head_dim)
        return {"slot_keys": shape, "slot_values": shape}

    @torch.no_grad()
    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        keys = tokens.k.flatten(0, 1)
        mean, variance = keys.mean(0), keys.var(0).clamp_min(1e-6)
        spaced = torch.linspace(0, len(keys) - 1, self.options.slots, device=keys.device).long()
        entry = ((keys[spaced] - mean) / variance).transpose(0, 1)
        deviation = torch.einsum("nhk,hmk->nhm", keys, entry).std(0).clamp_min(1e-6)
        self.entry.copy_(ENTRY * entry / deviation[..., None])

    def starts(self, tokens: Tokens, lookback: torch.Tensor) -> list[list[dict[str, torch.Tensor]]]:
        at_mean = torch.einsum("hk,hmk->hm", tokens.k.mean((0, 1)), self.entry)
        half_lives = self.options.half_lives_to_try(lookback, self.options.slots)
        eye = torch.eye(self.spec.head_dim, device=lookback.device).expand_as(self.q_map.weight)
        return [
            [{"forget_bias": _forget_bias(half_life) + at_mean} for half_life in half_lives],
            [{"q_map.weight": factor * eye} for factor in (1.0, 2.0, 4.0)],
        ]


def _forget_bias(half_life: torch.Tensor) -> torch.Tensor:
    return inverse_logsigmoid(-TEMPERATURE * decay_rate(half_life))


@register
class GSA(Hybrid):
    """Softmax attention over a fixed number of gated slots (GSA)."""

    name = "gsa"
    Options = GSAOptions
    recurrence_class = GatedSlots
