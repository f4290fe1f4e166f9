"""`lolcats`: a softmax window and a Hedgehog linear rest in one normaliser.

Source: LoLCATs (arXiv 2410.10254).

    y_t = [ γ Σ_{j in window} e^{s_tj - m_t} v_j + Σ_{j before it} φ_q(q_t)·φ_k(k_j) v_j ] / [ the same without v ]

s are the teacher's logits after RoPE, φ the Hedgehog maps `[softmax(xW), softmax(-xW)]`. Two things differ from the
released code. The window is exact: it rolls, at prefill as at decoding, and a key enters the linear sums when it
leaves the window. And the linear sums start small beside the window: γ is `e^{-w}` with w starting at log 0.01 and
calibrated per head on the teacher's heads. m_t is the window's log-sum-exp, so that γ is the window's whole weight;
with `shift: none` it is 0, and φ_q·φ_k e^w stands for the softmax's own e^s.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.calibration import CalibrationSample
from linearize.convert.mixers.base import Mixer, Rope, register
from linearize.convert.mixers.hybrid import HybridOptions
from linearize.convert.mixers.parts import FeatureMap
from linearize.convert.mixers.rat import ALL_THE_WEIGHT
from linearize.kernels.linear_attention import linear_attention
from linearize.kernels.window_attention import last_tokens, window_cache
from linearize.kernels.window_linear_attention import (
    branches,
    join,
    leaving_key,
    window_linear_attention,
    window_linear_attention_step,
)

SMALLEST_DENOMINATOR = 1e-6


class LoLCATsOptions(HybridOptions):
    """Options of `lolcats`."""

    shift: Literal["window", "none"] = Field(
        "window", description="what the window's logits are shifted by: their log-sum-exp, or nothing"
    )


class LinearRest(nn.Module):
    """Feature maps and weight of the linear sums. float32."""

    def __init__(self, spec: AttentionSpec, window: int) -> None:
        super().__init__()
        self.q_map = FeatureMap("hedgehog", spec.num_heads, spec.head_dim)
        self.k_map = FeatureMap("hedgehog", spec.num_heads, spec.head_dim)
        if window:
            self.log_weight = nn.Parameter(torch.full((spec.num_heads,), math.log(0.01)))


@register
class LoLCATs(Mixer):
    """A softmax window and a Hedgehog linear rest in one normaliser (LoLCATs)."""

    name = "lolcats"
    Options = LoLCATsOptions
    options: LoLCATsOptions
    float32_modules = ("linear_rest",)
    separable = True

    def __init__(self, spec: AttentionSpec, attention: nn.Module, layer_idx: int, options: LoLCATsOptions) -> None:
        super().__init__(spec, attention, layer_idx, options)
        self.linear_rest = LinearRest(spec, options.window)

    @property
    def window(self) -> int:
        """Keys of the window: never more than the teacher's own."""
        return min(self.options.window, self.spec.sliding_window or self.options.window)

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
        if self.window == 0:
            return self.without_window(q, k, v, padding_mask, state, cu_seqlens)
        if state is not None and q.shape[1] == 1 and not torch.is_grad_enabled():
            return self.step(q[:, 0], k[:, 0], v[:, 0], padding_mask, state)
        seen = padding_mask
        initial_state = None
        if state is not None:
            position, W = state["position"], self.window
            before = torch.arange(W, device=k.device) >= W - position[:, None]
            seen = torch.cat([before, k.new_ones(k.shape[:2], dtype=torch.bool) if seen is None else seen], 1)
            k = torch.cat([last_tokens(state["window_key"], position, W), k], 1)
            v = torch.cat([last_tokens(state["window_value"], position, W), v], 1)
            initial_state = state["memory"], state["normaliser"]
        o, sums = window_linear_attention(
            *self.features(q, k, v),
            self.log_weight(),
            **self.attention_options(),
            shift=self.options.shift,
            key_mask=seen,
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        assert sums is not None
        # Positions count from the first key kept here; what left the window before is in the sums.
        keys, values, position = window_cache(k, v, self.window + 1, key_mask=seen)
        state = {"window_key": keys, "window_value": values, "position": position}
        return o, state | {"memory": sums[0], "normaliser": sums[1]}

    def log_weight(self) -> torch.Tensor:
        """Logarithm `[H]` of the linear sums' weight; all or nothing when one branch is to be heard alone."""
        return self.linear_rest.log_weight + ALL_THE_WEIGHT[self.use]

    def attention_options(self) -> dict[str, Any]:
        """The window's options."""
        return {"window": self.window, "scale": self.spec.scaling, "softcap": self.spec.softcap}

    def features(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v, the features of q, and those of the keys that leave the window, in v's dtype."""
        leaving = k[:, : max(0, k.shape[1] - self.window)]
        return q, k, v, self.map_queries(q).to(v.dtype), self.map_keys(leaving).to(v.dtype)

    def map_queries(self, q: torch.Tensor) -> torch.Tensor:
        """`[B, T, H, K]` to features `[B, T, H, 2K]` in float32."""
        with torch.autocast(q.device.type, enabled=False):
            return self.linear_rest.q_map(q.float())

    def map_keys(self, k: torch.Tensor) -> torch.Tensor:
        """`[B, T, H_kv, K]` to features `[B, T, H, 2K]` in float32."""
        with torch.autocast(k.device.type, enabled=False):
            return self.linear_rest.k_map(self.expand(k).float())

    def step(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding_mask: torch.Tensor | None, state: State
    ) -> tuple[torch.Tensor, State]:
        """One token `[B, heads, K]`; the state is updated in place."""
        leaving = leaving_key(state["window_key"], state["position"], self.window)[:, None]
        o = window_linear_attention_step(
            q,
            k,
            v,
            self.map_queries(q[:, None])[:, 0].to(v.dtype),
            self.map_keys(leaving)[:, 0].to(v.dtype),
            self.log_weight(),
            state["window_key"],
            state["window_value"],
            state["position"],
            state["memory"],
            state["normaliser"],
            **self.attention_options(),
            shift=self.options.shift,
            key_mask=None if padding_mask is None else padding_mask[:, 0],
        )
        return o[:, None], state

    def without_window(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, State]:
        """Linear attention alone, its normaliser as a last column of the values."""
        values = F.pad(self.expand(v).float(), (0, 1), value=1.0)
        sums, memory = linear_attention(
            self.map_queries(q),
            self.map_keys(k),
            values if padding_mask is None else values * padding_mask[..., None, None],
            scale=1.0,
            initial_state=None if state is None else state["memory"],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        assert memory is not None
        return sums[..., :-1] / sums[..., -1:].clamp_min(SMALLEST_DENOMINATOR), {"memory": memory}

    @torch.no_grad()
    def calibrate(self, sample: CalibrationSample) -> None:
        """The linear sums' weight by search per head: the one whose heads are nearest to the teacher's."""
        if self.window == 0:
            return
        q, k, v = self.project(sample.hidden_states)
        q, k = self.rotate(q, k, sample.rope)
        parts = branches(*self.features(q, k, v), **self.attention_options())
        heads, weight = sample.heads.float(), self.linear_rest.log_weight
        candidates = torch.linspace(-20, 20, 81).tolist()
        errors = []
        for candidate in candidates:
            weight.fill_(candidate)
            errors.append((join(parts, weight, self.options.shift) - heads).square().sum((0, 1, 3)))
        best = torch.stack(errors).argmin(0)
        weight.copy_(torch.tensor(candidates).to(weight)[best])

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        spec, W = self.spec, self.window
        memory = spec.num_heads * 2 * spec.head_dim * (spec.head_dim + 1) * 4
        return memory + ((W + 1) * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize + 8 if W else 0)
