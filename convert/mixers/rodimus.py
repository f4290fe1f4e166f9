"""`rodimus`: data-dependent tempered selection (DDTS), multi-head, on the teacher's own q, k, v and o.

Source: Rodimus* (arXiv 2410.06577), the DDTS gates and recurrence; every query head has gates of its own, one
per key channel, and a softmax window stands beside the recurrence, which adds what the window cannot see:

    x'      = SiLU(conv(x))                           causal, depthwise, 4 taps, starting as the identity
    [a, b]  = up(down(x')) + bias                     per head and key channel, float32
    log α   = -softplus(a) · σ(b)                     log decay, ≤ 0
    q̃, k̃    = A_q q + a_q,  A_k k + a_k               per head, starting as q and k (before RoPE)
    k̂       = k̃ / ‖k̃‖ ⊙ softplus(a)^σ(b)              input gate, computed in log space
    S_t     = diag(α_t) S_{t-1} + k̂_t (β̂_t ⊙ v_t)ᵀ    value gate β̂ = σ(low-rank(x))
    y_t     = s ⊙ (K^-½ S_tᵀ q̃_t + d ⊙ v_t)           output scale s and feedthrough d, per head and channel
    out     = W_o (window_t + γ_t (y_t - c ⊙ window_t)),   γ_t = σ(r(x_t) - lse_t)

`lse_t` is the log-sum-exp of the window's logits and r(x) an estimate of that of the tokens before it, so γ
estimates the softmax mass outside the window. Without a window, out = W_o y.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.calibration import CalibrationSample, attention_logits, least_squares
from linearize.convert.mixers.base import Mixer, MixerOptions, Rope, register
from linearize.convert.mixers.hybrid import mean_log_mass, outside_window
from linearize.convert.mixers.parts import delayed, history
from linearize.convert.mixers.window import window_bytes, window_mix
from linearize.kernels.linear_attention import linear_attention


class RodimusOptions(MixerOptions):
    """Options of `rodimus`."""

    window: int = Field(64, ge=0, description="keys of the softmax window beside the recurrence; 0 for none")
    rank: int = Field(16, ge=1, description="rank of the gate projections")
    conv: int = Field(4, ge=1, description="taps of the short convolution before the gates")
    half_life: float | None = Field(
        None,
        gt=0,
        description="initial half-life of the state in tokens; none: 64 beside a window, 16 without",
    )
    spread: float | None = Field(
        None,
        ge=1,
        description="a head's channels start with half-lives from half_life / spread to half_life · spread; "
        "none: 8 beside a window, 4 without",
    )
    rope: bool = Field(False, description="whether q and k of the recurrence carry RoPE")

    def half_lives(self, channels: int) -> torch.Tensor:
        """Initial half-lives of a head's key channels, tokens, `[channels]`: evenly spaced on a log scale."""
        half_life = self.half_life or (64.0 if self.window else 16.0)
        spread = self.spread or (8.0 if self.window else 4.0)
        return half_life * spread ** torch.linspace(-1, 1, channels)


class ShortConv(nn.Module):
    """Causal depthwise convolution over time, starting as the identity."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        weight = torch.zeros(width, taps)
        weight[:, -1] = 1
        self.weight = nn.Parameter(weight)

    def forward(
        self, x: torch.Tensor, past: torch.Tensor | None, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x `[B, T, D]`, past `[B, taps-1, D]` or None at the start -> y of x's shape, and the next past."""
        tokens, taps = x.shape[1], self.weight.shape[1]
        longer = history(x, past, taps - 1)
        y = self.weight[:, -1] * x
        for lag in range(1, taps):
            y = y + self.weight[:, -1 - lag] * delayed(longer, lag, tokens, cu_seqlens)
        return y, longer[:, tokens:]


def tempered(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay `-softplus(a) · σ(b)` and log input gate `σ(b) · log softplus(a)`."""
    temperature = torch.sigmoid(b)
    # log softplus(a) underflows for very negative a, where softplus(a) = e^a.
    log_softplus = torch.where(a < -15, a, torch.log(F.softplus(a.clamp(min=-15))))
    return -F.softplus(a) * temperature, temperature * log_softplus


class DDTSGates(nn.Module):
    """Log decay, log input gate and value gate from the block's input. float32 throughout."""

    def __init__(self, spec: AttentionSpec, options: RodimusOptions) -> None:
        super().__init__()
        width, key_width = spec.hidden_size, spec.num_heads * spec.head_dim
        self.heads = spec.num_heads
        self.conv = ShortConv(width, options.conv)
        self.down = nn.Linear(width, options.rank, bias=False)
        self.up = nn.Linear(options.rank, 2 * key_width)
        self.value_down = nn.Linear(width, options.rank, bias=False)
        self.value_up = nn.Linear(options.rank, key_width)
        for layer in (self.down, self.value_down):
            nn.init.normal_(layer.weight, std=width**-0.5)
        for layer in (self.up, self.value_up):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.set_half_life(options.half_lives(spec.head_dim).expand(spec.num_heads, -1))

    @torch.no_grad()
    def set_half_life(self, tokens: torch.Tensor) -> None:
        """Bias the gates so that the state's rows halve in `tokens` `[H, K]` tokens (at temperature 1/2)."""
        g = 2 * math.log(2) / tokens.to(self.up.bias)
        bias = self.up.bias.view(2, self.heads, -1)
        bias[0] = torch.log(torch.expm1(g))
        bias[1] = 0

    def forward(
        self, x: torch.Tensor, past: torch.Tensor | None, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x `[B, T, D]` -> log decay, log input gate, value gate, each `[B, T, H, K]`, and conv state."""
        x = x.float()
        convolved, past = self.conv(x, past, cu_seqlens)
        a, b = self.up(self.down(F.silu(convolved))).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        log_decay, log_input = tempered(a, b)
        value_gate = torch.sigmoid(self.value_up(self.value_down(x))).unflatten(-1, (self.heads, -1))
        return log_decay, log_input, value_gate, past


class Branch(nn.Module):
    """How the recurrence's output joins the window's: s, d, c and r of the module's docstring. float32.

    The small starting scale keeps an uncalibrated student close to its window.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        shape = (spec.num_heads, spec.head_dim)
        self.scale = nn.Parameter(torch.full(shape, 0.01))
        self.feedthrough = nn.Parameter(torch.zeros(shape))
        self.window_part = nn.Parameter(torch.zeros(shape))
        self.log_mass = nn.Linear(spec.hidden_size, spec.num_heads)
        nn.init.zeros_(self.log_mass.weight)
        nn.init.zeros_(self.log_mass.bias)


class Maps(nn.Module):
    """Per head, an affine map of q and of k, starting as the identity. float32."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        eye = torch.eye(spec.head_dim).expand(spec.num_heads, -1, -1)
        self.q_weight = nn.Parameter(eye.clone())
        self.k_weight = nn.Parameter(eye.clone())
        self.q_bias = nn.Parameter(torch.zeros(spec.num_heads, spec.head_dim))
        self.k_bias = nn.Parameter(torch.zeros(spec.num_heads, spec.head_dim))

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k `[B, T, H, K]` -> q̃, k̃ of the same shape."""
        q = torch.einsum("bthk,hkc->bthc", q, self.q_weight) + self.q_bias
        k = torch.einsum("bthk,hkc->bthc", k, self.k_weight) + self.k_bias
        return q, k


@register
class Rodimus(Mixer):
    """Vector-decay linear attention with DDTS gates; see the module's docstring."""

    name = "rodimus"
    Options = RodimusOptions
    options: RodimusOptions
    float32_modules = ("gates", "branch", "maps")
    separable = True

    def __init__(self, spec: AttentionSpec, attention: nn.Module, layer_idx: int, options: RodimusOptions) -> None:
        super().__init__(spec, attention, layer_idx, options)
        self.gates = DDTSGates(spec, options)
        self.branch = Branch(spec)
        self.maps = Maps(spec)

    def recur(
        self,
        hidden_states: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, State]:
        """The recurrent branch before its output scale, `[B, T, H, V]` float32, and its state."""
        x = hidden_states if padding_mask is None else hidden_states * padding_mask[..., None]
        log_decay, log_input, value_gate, conv = self.gates(x, None if state is None else state["conv"], cu_seqlens)
        q, k = self.maps(q.float(), self.expand(k).float())
        k = F.normalize(k, dim=-1, eps=1e-12) * log_input.exp()
        v = self.expand(v).float()
        if padding_mask is not None:
            k = k * padding_mask[..., None, None]
        o, memory = linear_attention(
            q,
            k,
            v * value_gate,
            log_decay,
            initial_state=None if state is None else state["memory"],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        return o + self.branch.feedthrough * v, {"memory": memory, "conv": conv}

    def mix(
        self,
        hidden_states: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State]:
        q, k, v = self.project(hidden_states)
        rotated_q, rotated_k = self.rotate(q, k, rope)
        memory_q, memory_k = (rotated_q, rotated_k) if self.options.rope else (q, k)
        y, new_state = self.recur(hidden_states, memory_q, memory_k, v, padding_mask, state, cu_seqlens)
        y = y * self.branch.scale
        if self.options.window == 0:
            return y, new_state
        window, lse, window_state = window_mix(
            self.spec, self.options.window, rotated_q, rotated_k, v, padding_mask, state, cu_seqlens
        )
        window = window.float()
        if self.use != "both":
            return window if self.use == "window" else y, {**new_state, **window_state}
        gamma = torch.sigmoid(self.branch.log_mass(hidden_states.float()) - lse)[..., None]
        return window + gamma * (y - self.branch.window_part * window), {**new_state, **window_state}

    @torch.no_grad()
    def calibrate(self, sample: CalibrationSample) -> None:
        """s and d (or c, beside a window) by least squares on the teacher's heads, r's bias by its mean."""
        spec, branch = self.spec, self.branch
        q, k, v = self.project(sample.hidden_states)
        rotated_q, rotated_k = self.rotate(q, k, sample.rope)
        memory_q, memory_k = (rotated_q, rotated_k) if self.options.rope else (q, k)
        y, _ = self.recur(sample.hidden_states, memory_q, memory_k, v, None, None, None)
        if self.options.window == 0:
            factors = least_squares([y, self.expand(v)], sample.heads)
            branch.scale.copy_(factors[:, :1].expand_as(branch.scale))
            branch.feedthrough.copy_((factors[:, 1:] / factors[:, :1]).expand_as(branch.scale))
            return
        window, lse, _ = window_mix(spec, self.options.window, rotated_q, rotated_k, v, None, None)
        outside = outside_window(attention_logits(self, sample), self.options.window)
        branch.log_mass.bias.copy_(mean_log_mass(outside, branch.log_mass.bias))
        gamma = torch.sigmoid(branch.log_mass(sample.hidden_states.float()) - lse)[..., None]
        factors = least_squares([gamma * y, -gamma * window.float()], sample.heads.float() - window.float())
        branch.scale.copy_(factors[:, :1].expand_as(branch.scale))
        branch.window_part.copy_(factors[:, 1:].expand_as(branch.scale))

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        spec = self.spec
        memory = spec.num_heads * spec.head_dim * spec.head_dim * 4
        conv = (self.options.conv - 1) * spec.hidden_size * 4
        window = window_bytes(spec, self.options.window, dtype) if self.options.window else 0
        return memory + conv + window
