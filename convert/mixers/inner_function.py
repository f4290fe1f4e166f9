"""`inner-function`: the teacher's softmax attention with values out of learned functions and a learned mask.

Source: Wonderful Matrices (arXiv 2412.11834), inner function attention with a dynamic mask. Not a recurrence: keys and
values of all tokens are kept.

    p_j  = softmax over the top k of (W_q x_j)·key_i
    v'_j = v_j ⊙ (1 + Σ_i p_ji E_i)
    b_hj = exp(A_h · softplus(W_dt v'_j)_h) - 1                     added to every logit of key j in head h

E and A start at zero, where this is the teacher. The paper's values are x ⊙ Σ E_i; here the teacher's own take x's
place. The 1 taken from the bias changes no softmax. The bias travels in further channels of the keys, one per query
head of the group, which q reads by 1 / scaling: the cache and the attention functions stay those of the teacher's
family. A softcap covers logit and bias together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.mixers.base import MixerOptions, register
from linearize.convert.mixers.softmax import SoftmaxAttention

LARGEST_EXPONENT = 5.0
"""e^5 nats more or less settle any softmax."""
ALIGNED = 8
"""Widths that fused attention kernels take are multiples of this."""


class InnerFunctionOptions(MixerOptions):
    """Options of `inner-function`."""

    experts: int = Field(64, ge=1, description="inner functions N, each a factor per channel of the values")
    top_k: int = Field(4, ge=1, description="inner functions per token")
    key_dim: int = Field(64, ge=1, description="width in which tokens and inner functions are compared")
    mask: bool = Field(True, description="whether every head has a learned bias per key, the dynamic mask")

    @model_validator(mode="after")
    def _enough(self) -> InnerFunctionOptions:
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, more than the {self.experts} experts")
        return self


class InnerFunctions(nn.Module):
    """Factors on the values, found by each token among N; they start at 1. float32."""

    def __init__(self, spec: AttentionSpec, options: InnerFunctionOptions) -> None:
        super().__init__()
        self.top_k, self.heads = options.top_k, spec.num_kv_heads
        self.query = nn.Linear(spec.hidden_size, options.key_dim, bias=False)
        self.keys = nn.Parameter(torch.empty(options.experts, options.key_dim))
        self.experts = nn.Parameter(torch.zeros(options.experts, spec.num_kv_heads * spec.head_dim))
        nn.init.normal_(self.query.weight, std=spec.hidden_size**-0.5)
        nn.init.normal_(self.keys, std=options.key_dim**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, T, D]` -> `[B, T, H_kv, V]` float32."""
        scores = self.query(x.float()) @ self.keys.T
        best, index = scores.topk(self.top_k)
        weights = torch.zeros_like(scores).scatter(-1, index, best.softmax(-1))
        return (1 + weights @ self.experts).unflatten(-1, (self.heads, -1))


class DynamicMask(nn.Module):
    """A bias per query head and key, read off the key's values; it starts at 0. float32."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.step = nn.Linear(spec.num_kv_heads * spec.head_dim, spec.num_heads)
        self.strength = nn.Parameter(torch.zeros(spec.num_heads))
        nn.init.normal_(self.step.weight, std=self.step.in_features**-0.5)
        nn.init.zeros_(self.step.bias)

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        """v `[B, T, H_kv, V]` -> `[B, T, H]` float32."""
        exponent = self.strength * F.softplus(self.step(v.float().flatten(2)))
        return torch.expm1(exponent.clamp_max(LARGEST_EXPONENT))


@register
class InnerFunctionAttention(SoftmaxAttention):
    """Softmax attention over all keys with learned functions of the values and a learned mask (Wonderful Matrices)."""

    name = "inner-function"
    Options = InnerFunctionOptions
    options: InnerFunctionOptions
    float32_modules = ("inner_functions", "dynamic_mask")

    def __init__(
        self, spec: AttentionSpec, attention: nn.Module, layer_idx: int, options: InnerFunctionOptions
    ) -> None:
        super().__init__(spec, attention, layer_idx, options)
        self.inner_functions = InnerFunctions(spec, options)
        self.dynamic_mask = DynamicMask(spec) if options.mask else nn.Identity()

    @property
    def bias_channels(self) -> int:
        """Further channels of a key: one per query head that reads it, rounded up to what kernels take."""
        return -(-self.spec.group // ALIGNED) * ALIGNED if self.options.mask else 0

    def adapt(
        self, hidden_states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.autocast(hidden_states.device.type, enabled=False):
            v = (v.float() * self.inner_functions(hidden_states)).to(v.dtype)
            if not self.options.mask:
                return q, k, v
            bias = self.dynamic_mask(v).unflatten(-1, (self.spec.num_kv_heads, -1))
        bias = F.pad(bias, (0, self.bias_channels - self.spec.group))
        reads = torch.eye(self.spec.group, self.bias_channels, dtype=q.dtype, device=q.device) / self.spec.scaling
        reads = reads.repeat(self.spec.num_kv_heads, 1).expand(*q.shape[:2], -1, -1)
        return torch.cat([q, reads], -1), torch.cat([k, bias.to(k.dtype)], -1), v

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        kept = context if self.spec.sliding_window is None else min(context, self.spec.sliding_window)
        bias = kept * self.spec.num_kv_heads * self.bias_channels * dtype.itemsize
        return super().state_bytes(context, dtype) + bias
