"""`softmax`: the teacher's attention recomputed from its `AttentionSpec`, the identity among mixers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from linearize.convert.attention_spec import kv_bytes
from linearize.convert.cache import State
from linearize.convert.mixers.base import Mixer, Rope, register
from linearize.kernels.window_attention import window_attention


@register
class SoftmaxAttention(Mixer):
    """Equals the teacher. It proves the projections, the head expansion and the positions of a family."""

    name = "softmax"
    recurrent = False
    is_causal = True
    num_key_value_groups = 1  # for transformers' attention functions: heads come expanded

    def attend(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rope | None = None,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        q, k, v = self.project(hidden_states)
        q, k = self.rotate(q, k, position_embeddings)
        q, k, v = (x.transpose(1, 2) for x in self.adapt(hidden_states, q, k, v))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        k, v = (self.expand(x.transpose(1, 2)).transpose(1, 2) for x in (k, v))
        eager = sys.modules[type(self.attention).__module__].eager_attention_forward
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.attention.config._attn_implementation, eager)
        heads, _ = attention(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=0.0,
            scaling=self.spec.scaling,
            sliding_window=self.spec.sliding_window,
            softcap=self.spec.softcap,
            **kwargs,
        )
        return self.output(heads), None

    def mix(
        self,
        hidden_states: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State]:
        """Whole sequences only: what stages compare with the teacher's heads."""
        q, k, v = self.project(hidden_states)
        q, k, v = self.adapt(hidden_states, *self.rotate(q, k, rope), v)
        heads = window_attention(
            q,
            k,
            v,
            window=self.spec.sliding_window or q.shape[1],
            scale=self.spec.scaling,
            softcap=self.spec.softcap,
            key_mask=padding_mask,
            cu_seqlens=cu_seqlens,
        )
        assert isinstance(heads, torch.Tensor)
        return heads, {}

    def adapt(
        self, hidden_states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What attention and its cache use instead of q `[B, T, H, K]`, k and v `[B, T, H_kv, K]`; here they themselves."""
        return q, k, v

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        return kv_bytes(self.spec, context, dtype.itemsize)
