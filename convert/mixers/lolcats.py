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
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.calibration import CalibrationSample
from linearize.convert.mixers.base import Mixer, Rope, register
from linearize.convert.mixers.hybrid import HybridOptions
from linearize.convert.mixers.parts import FeatureMap, delayed, history
from linearize.kernels.linear_attention import linear_attention
from linearize.kernels.window_attention import window_attention

SMALLEST_DENOMINATOR = 1e-6
LARGEST_EXPONENT = 60.0  # e^±60 times the sums stays inside float32


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
        sums, window, lse, new_state = self.branches(hidden_states, rope, padding_mask, state, cu_seqlens)
        if window is None or lse is None or self.use == "recurrence":
            return sums[..., :-1] / sums[..., -1:].clamp_min(SMALLEST_DENOMINATOR), new_state
        if self.use == "window":
            return window, new_state
        return self.join(sums, window, lse), new_state

    def branches(
        self,
        hidden_states: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, State]:
        """The linear sums `[B, T, H, V + 1]`, their normaliser last; the window's output and its log-sum-exp."""
        q, k, v = self.project(hidden_states)
        q, k = self.rotate(q, k, rope)
        W, (batch, tokens) = self.window, q.shape[:2]
        seen = padding_mask if padding_mask is not None else k.new_ones(batch, tokens, dtype=torch.bool)
        keys, values, real = (
            history(x, state[name] if state is not None and W else None, W)
            for x, name in ((k, "window_key"), (v, "window_value"), (seen, "window_mask"))
        )
        old_k, old_v, old = (delayed(x, W, tokens, cu_seqlens) for x in (keys, values, real))
        with torch.autocast(q.device.type, enabled=False):
            phi_q = self.linear_rest.q_map(q.float())
            phi_k = self.linear_rest.k_map(self.expand(old_k).float())
        sums, memory = linear_attention(
            phi_q,
            phi_k,
            F.pad(self.expand(old_v).float(), (0, 1), value=1.0) * old[..., None, None],
            scale=1.0,
            initial_state=None if state is None else state["memory"],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        assert memory is not None
        if W == 0:
            return sums, None, None, {"memory": memory}
        new_state = {"memory": memory}
        new_state |= {
            "window_key": keys[:, tokens:],
            "window_value": values[:, tokens:],
            "window_mask": real[:, tokens:],
        }
        masked = padding_mask is not None or state is not None
        window, lse = window_attention(
            q,
            keys if masked else k,
            values if masked else v,
            window=W,
            scale=self.spec.scaling,
            softcap=self.spec.softcap,
            key_mask=real if masked else None,
            cu_seqlens=cu_seqlens,
            return_lse=True,
        )
        return sums, window, lse, new_state

    def join(self, sums: torch.Tensor, window: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """The formula, divided by the linear sums' weight; the window's part is `e^exponent`."""
        exponent = -self.linear_rest.log_weight
        exponent = lse + exponent if self.options.shift == "none" else exponent.expand_as(lse)
        window_weight = exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp()[..., None]
        numerator, normaliser = sums[..., :-1], sums[..., -1:]
        window = window.float()
        return window + (numerator - normaliser * window) / (normaliser + window_weight)

    @torch.no_grad()
    def calibrate(self, sample: CalibrationSample) -> None:
        """The linear sums' weight by search per head: the one whose heads are nearest to the teacher's."""
        sums, window, lse, _ = self.branches(sample.hidden_states, sample.rope, None, None, None)
        if window is None or lse is None:
            return
        heads, weight = sample.heads.float(), self.linear_rest.log_weight
        candidates = torch.linspace(-20, 20, 81).tolist()
        errors = []
        for candidate in candidates:
            weight.fill_(candidate)
            errors.append((self.join(sums, window, lse) - heads).square().sum((0, 1, 3)))
        best = torch.stack(errors).argmin(0)
        weight.copy_(torch.tensor(candidates).to(weight)[best])

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        spec, W = self.spec, self.window
        memory = spec.num_heads * 2 * spec.head_dim * (spec.head_dim + 1) * 4
        return memory + W * (2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize + 1)
