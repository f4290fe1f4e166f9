"""Building blocks that several recurrences share: delays, convolutions, gates, norms and feature maps.

Their tensors are float32. They multiply in their input's dtype, which is bfloat16 in a bfloat16 model; what a decay is
made of is summed and kept in float32.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.kernels.norm_gate import Activation, Order, norm_gate
from linearize.kernels.short_conv import short_conv, short_conv_step

OPEN_SWISH = 1.2784645
"""swish(OPEN_SWISH) = 1: where a swish gate lets everything pass."""
OPEN_SIGMOID = 2.0
"""Where a sigmoid gate starts: nearly open."""

FeatureMapName = Literal["hedgehog", "relu", "elu", "identity"]


def is_step(x: torch.Tensor, past: object) -> bool:
    """Whether x `[B, T, ...]` is one token of decoding: kernels then update what is past in place."""
    return past is not None and x.shape[1] == 1 and not torch.is_grad_enabled()


def history(x: torch.Tensor, past: torch.Tensor | None, length: int) -> torch.Tensor:
    """x `[B, T, ...]` with `length` earlier entries before it: those of `past`, zeros at a sequence's start."""
    if past is None:
        past = x.new_zeros(x.shape[0], length, *x.shape[2:])
    return torch.cat([past.to(x.dtype), x], 1)


def delayed(longer: torch.Tensor, lag: int, tokens: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """What stood `lag` entries before each of the last `tokens` entries of `longer`.

    Args:
        longer: `[B, S, ...]` with S >= lag + tokens, from `history`.
        cu_seqlens: `[N + 1]` boundaries of packed sequences among the last `tokens` entries.

    Returns:
        `[B, tokens, ...]`, zeros (False) where the own sequence had not begun.
    """
    first = longer.shape[1] - tokens - lag
    y = longer[:, first : first + tokens]
    if cu_seqlens is None:
        return y
    outside = position_in_sequence(tokens, cu_seqlens) < lag
    return y.masked_fill(outside.view(1, -1, *(1,) * (y.dim() - 2)), 0)


def position_in_sequence(tokens: int, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Position `[T]` of every packed token inside its own sequence."""
    index = torch.arange(tokens, device=cu_seqlens.device)
    return index - cu_seqlens[torch.searchsorted(cu_seqlens, index, right=True) - 1]


class CausalConv(nn.Module):
    """Causal depthwise convolution over time, starting as the identity."""

    def __init__(self, width: int, taps: int, bias: bool = True) -> None:
        super().__init__()
        weight = torch.zeros(width, taps)
        weight[:, -1] = 1
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(
        self,
        x: torch.Tensor,
        past: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        activation: Literal["silu"] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x `[B, T, C]`, past `[B, taps-1, C]` or None at the start -> y of x's shape and dtype, the next past (float32)."""
        if past is not None and is_step(x, past):
            return short_conv_step(x[:, 0], self.weight, past, self.bias, activation)[:, None], past
        y, after = short_conv(
            x,
            self.weight,
            self.bias,
            activation,
            initial_state=past,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        assert after is not None
        return y, after.float()


class Linear(nn.Linear):
    """A linear map of float32 tensors that multiplies in its input's dtype and adds its bias in float32."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Without the bias, in x's dtype."""
        return F.linear(x, self.weight.to(x.dtype))

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """With the bias, in x's dtype."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        return self.product(x) if self.bias is None else self.product(x) + self.bias


class LowRank(nn.Module):
    """`up(down(x)) + bias` per head and channel; it starts as the bias alone."""

    def __init__(self, width: int, rank: int, heads: int, channels: int, bias: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.down = Linear(width, rank, bias=False)
        self.up = Linear(rank, heads * channels)
        nn.init.normal_(self.down.weight, std=width**-0.5)
        nn.init.zeros_(self.up.weight)
        nn.init.constant_(self.up.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, T, D]` -> `[B, T, H, channels]` float32."""
        return self._by_head(self.up(self.down(x)))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Without the bias, in x's dtype."""
        return self._by_head(self.up.product(self.down(x)))

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """With the bias, in x's dtype."""
        return self._by_head(self.up.rounded(self.down(x)))

    @property
    def bias(self) -> torch.Tensor:
        """`[H, channels]`."""
        return self.up.bias.view(self.heads, -1)

    @torch.no_grad()
    def set_bias(self, value: torch.Tensor) -> None:
        """value `[H, channels]`."""
        self.up.bias.copy_(value.flatten())

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1))


class HeadNorm(nn.Module):
    """RMSNorm over the channels of each head, with its own gain per head and channel, and perhaps an output gate.

    Args:
        gate: activation of a low-rank gate of the block's input, one per head and channel, which starts open: at 1 with
            "swish", at σ(2) with "sigmoid"; None for no gate.
        rank: of the gate's projection.
        order: whether the norm reads the gated heads or the gate stands on the normed ones.
    """

    def __init__(
        self, spec: AttentionSpec, gate: Activation | None = None, rank: int = 0, order: Order = "norm_then_gate"
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(spec.num_heads, spec.head_dim))
        self.activation: Activation = gate or "swish"
        self.order = order
        self.gate = None
        if gate is not None:
            start = OPEN_SWISH if gate == "swish" else OPEN_SIGMOID
            self.gate = LowRank(spec.hidden_size, rank, spec.num_heads, spec.head_dim, start)

    def forward(self, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """o `[B, T, H, V]`, x `[B, T, D]` the block's input -> o's shape and dtype."""
        gate = None if self.gate is None else self.gate.rounded(x)
        return norm_gate(o, self.weight, gate, order=self.order, activation=self.activation)


class HeadMap(nn.Module):
    """A linear map of each head's channels, starting as the identity."""

    def __init__(self, heads: int, channels: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(channels).repeat(heads, 1, 1))
        self.bias = nn.Parameter(torch.zeros(heads, channels)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, T, H, K]` -> `[B, T, H, K]`."""
        y = torch.einsum("bthk,hkc->bthc", x, self.weight.to(x.dtype))
        return y if self.bias is None else y + self.bias.to(x.dtype)


class FeatureMap(nn.Module):
    """φ of linear attention by name: `hedgehog` is `[softmax(xW), softmax(-xW)]`, twice as wide; `relu` (T2R) is
    `ReLU(xW)`; `elu` is `1 + elu(x)`; `identity` is x. W stands per head and starts as the identity.
    """

    def __init__(self, name: FeatureMapName, heads: int, channels: int) -> None:
        super().__init__()
        self.name = name
        self.width = 2 * channels if name == "hedgehog" else channels
        if name in ("hedgehog", "relu"):
            self.map = HeadMap(heads, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, T, H, K]` -> `[B, T, H, width]`."""
        if self.name == "hedgehog":
            mapped = self.map(x)
            return torch.cat([mapped.softmax(-1), (-mapped).softmax(-1)], -1)
        if self.name == "relu":
            return torch.relu(self.map(x))
        return x if self.name == "identity" else 1 + F.elu(x)


class ConstantDecay(nn.Module):
    """One learned decay per head, `log a = -exp(log_rate)`.

    Args:
        rates: `[H]` where `-log a` starts.
    """

    def __init__(self, rates: torch.Tensor) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(rates.log())

    def forward(self) -> torch.Tensor:
        """Log decay `[H]`."""
        return -self.log_rate.exp()

    @torch.no_grad()
    def order(self, lookback: torch.Tensor) -> None:
        """Give slower decays to heads with a larger `lookback` `[H]`."""
        slowest_first = self.log_rate.sort().values
        self.log_rate[lookback.argsort(descending=True)] = slowest_first


def decay_rate(half_life: torch.Tensor) -> torch.Tensor:
    """`-log a` of a state that halves in `half_life` tokens."""
    return math.log(2) / half_life


def inverse_logsigmoid(log_a: torch.Tensor) -> torch.Tensor:
    """The logit whose log-sigmoid is `log_a` < 0."""
    return log_a - torch.log(-torch.expm1(log_a))


def inverse_softplus(y: torch.Tensor) -> torch.Tensor:
    """The number whose softplus is `y` > 0."""
    return y + torch.log(-torch.expm1(-y))
