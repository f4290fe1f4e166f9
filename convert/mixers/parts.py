"""Building blocks that several recurrences share: delays, gates, norms and feature maps. All float32."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

OPEN_SWISH = 1.2784645
"""swish(OPEN_SWISH) = 1: where a swish gate lets everything pass."""

FeatureMapName = Literal["hedgehog", "relu", "elu", "identity"]


def history(x: torch.Tensor, past: torch.Tensor | None, length: int) -> torch.Tensor:
    """x `[B, T, ...]` with `length` earlier entries before it: those of `past`, zeros at a sequence's start."""
    if past is None:
        past = x.new_zeros(x.shape[0], length, *x.shape[2:])
    return torch.cat([past, x], 1)


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
    """Causal depthwise convolution over time with bias, starting as the identity."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        weight = torch.zeros(width, taps)
        weight[:, -1] = 1
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(
        self, x: torch.Tensor, past: torch.Tensor | None, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x `[B, T, C]`, past `[B, taps-1, C]` or None at the start -> y of x's shape, and the next past."""
        tokens, taps = x.shape[1], self.weight.shape[1]
        longer = history(x, past, taps - 1)
        y = self.weight[:, -1] * x + self.bias
        for lag in range(1, taps):
            y = y + self.weight[:, -1 - lag] * delayed(longer, lag, tokens, cu_seqlens)
        return y, longer[:, tokens:]


class LowRank(nn.Module):
    """`up(down(x)) + bias` per head and channel; it starts as the bias alone."""

    def __init__(self, width: int, rank: int, heads: int, channels: int, bias: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, heads * channels)
        nn.init.normal_(self.down.weight, std=width**-0.5)
        nn.init.zeros_(self.up.weight)
        nn.init.constant_(self.up.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, T, D]` -> `[B, T, H, channels]`."""
        return self.up(self.down(x)).unflatten(-1, (self.heads, -1))

    @torch.no_grad()
    def set_bias(self, value: torch.Tensor) -> None:
        """value `[H, channels]`."""
        self.up.bias.copy_(value.flatten())


class SwishGate(LowRank):
    """`swish` of a low-rank projection, one per head and channel; it starts at 1."""

    def __init__(self, width: int, rank: int, heads: int, channels: int) -> None:
        super().__init__(width, rank, heads, channels, bias=OPEN_SWISH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(super().forward(x))


class SigmoidGate(LowRank):
    """`σ` of a low-rank projection, one per head and channel; it starts nearly open."""

    def __init__(self, width: int, rank: int, heads: int, channels: int) -> None:
        super().__init__(width, rank, heads, channels, bias=2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(super().forward(x))


class HeadNorm(nn.Module):
    """RMSNorm over the channels of each head, with its own gain per head and channel."""

    def __init__(self, heads: int, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, channels))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, T, H, V]`."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class HeadMap(nn.Module):
    """A linear map of each head's channels, starting as the identity."""

    def __init__(self, heads: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(channels).repeat(heads, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, T, H, K]` -> `[B, T, H, K]`."""
        return torch.einsum("bthk,hkc->bthc", x, self.weight)


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, T, D]` -> log decay `[B, T, H]`."""
        return -self.log_rate.exp().expand(*x.shape[:2], -1)

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
