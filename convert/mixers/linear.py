"""`linear`: linear attention without decay, by feature map.

    o_t = φ(q_t)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_t)ᵀ Σ_j φ(k_j)

φ: `hedgehog` (LoLCATs, arXiv 2410.10254; Hedgehog, arXiv 2402.04347), `relu` (T2R, arXiv 2103.13076), `elu`
(arXiv 2006.16236), or `identity`, which has a norm per head instead of the denominator. Learned maps stand per head,
separate for q and k, and start as the identity.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.mixers.base import register
from linearize.convert.mixers.hybrid import Hybrid, HybridOptions, Recurrence, Tokens
from linearize.convert.mixers.parts import FeatureMap, FeatureMapName, HeadNorm

SMALLEST_DENOMINATOR = 1e-6


class LinearOptions(HybridOptions):
    """Options of `linear`."""

    feature_map: FeatureMapName = Field("hedgehog", description="hedgehog, relu (T2R), elu or identity")
    rope: bool = Field(True, description="whether q and k carry RoPE before the feature map")


class LinearRecurrence(Recurrence):
    """Sums of φ(k) vᵀ, and of φ(k) in one column more."""

    def __init__(self, spec: AttentionSpec, options: LinearOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        self.rope = options.rope
        self.q_map = FeatureMap(options.feature_map, spec.num_heads, spec.head_dim)
        self.k_map = FeatureMap(options.feature_map, spec.num_heads, spec.head_dim)
        self.norm = HeadNorm(spec) if options.feature_map == "identity" else None

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        q, k = tokens.rotate(tokens.q, tokens.k) if self.rope else (tokens.q, tokens.k)
        q, k = self.q_map(q), self.k_map(k)
        if self.norm is not None:
            o, memory = tokens.linear_attention(q, k, tokens.v, None, state)
            return self.norm(o, tokens.x), {"memory": memory}
        v = F.pad(tokens.v, (0, 1), value=1.0)
        o, memory = tokens.linear_attention(q, k, v, None, state, scale=1.0)
        return o[..., :-1] / o[..., -1:].clamp_min(SMALLEST_DENOMINATOR), {"memory": memory}

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        columns = self.spec.head_dim + (self.norm is None)
        return {"memory": (self.spec.num_heads, self.k_map.width, columns)}


@register
class Linear(Hybrid):
    """Linear attention without decay: Hedgehog, T2R, elu or identity features."""

    name = "linear"
    Options = LinearOptions
    recurrence_class = LinearRecurrence
