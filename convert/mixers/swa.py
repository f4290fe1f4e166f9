"""`swa`: sliding-window attention alone, the control that every recurrent mixer must beat."""

from __future__ import annotations

import torch
from pydantic import Field

from linearize.convert.cache import State
from linearize.convert.mixers.base import Mixer, MixerOptions, Rope, register
from linearize.convert.mixers.window import window_bytes, window_mix


class SlidingWindowOptions(MixerOptions):
    """Options of `swa`."""

    window: int = Field(64, ge=1, description="keys a query sees, its own included; exact for sequences up to it")


@register
class SlidingWindowAttention(Mixer):
    """Softmax over the last `window` keys with the teacher's own q, k, v; nothing new to train."""

    name = "swa"
    Options = SlidingWindowOptions
    options: SlidingWindowOptions

    def mix(
        self,
        hidden_states: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State]:
        q, k, v = self.project(hidden_states)
        q, k = self.rotate(q, k, rope)
        heads, _, state = window_mix(self.spec, self.options.window, q, k, v, padding_mask, state, cu_seqlens)
        return heads, state

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        return window_bytes(self.spec, self.options.window, dtype)
