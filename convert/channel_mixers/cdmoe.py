"""`cdmoe`: the teacher's MLP and, beside it, many one-neuron experts found by product keys.

Source: Wonderful Matrices (arXiv 2412.11834), cross-domain mixture of experts; retrieval as PEER (arXiv 2407.04153).

    φ(x)     = the teacher's MLP, shared by all tokens
    [a, b]   = W_q x                                  two queries per retrieval head, float32
    experts  = (i, j) of the top k of a·K_i + b·K'_j  out of √N × √N; their sums are the scores s
    y        = φ(x) + Σ_{heads, k} act(φ(x)·down_e · s_e) up_e

`up` starts at zero, so the start equals the teacher to the bit. In the first step only `up` has a gradient.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn
from torch.utils.checkpoint import checkpoint

from linearize.convert.channel_mixers.base import ChannelMixer, ChannelMixerOptions, register

BLOCK = 1024
"""Tokens whose experts are gathered at a time: every token reads `2 · heads · top_k` rows of width D."""


class CDMoEOptions(ChannelMixerOptions):
    """Options of `cdmoe`."""

    experts: int = Field(1024, ge=4, description="private experts N, a square number")
    heads: int = Field(2, ge=1, description="retrieval heads; each finds experts of its own for every token")
    top_k: int = Field(8, ge=1, description="experts per retrieval head and token; at most √N")
    key_dim: int = Field(64, ge=1, description="width of each half of a retrieval key")

    @model_validator(mode="after")
    def _is_a_grid(self) -> CDMoEOptions:
        side = math.isqrt(self.experts)
        if side * side != self.experts:
            raise ValueError(f"experts is {self.experts}, no square number; try {side * side} or {(side + 1) ** 2}")
        if self.top_k > side:
            raise ValueError(f"top_k is {self.top_k}, more than √experts = {side}")
        return self


class ProductKeys(nn.Module):
    """Finds experts on a grid: top k rows, top k columns, then the top k of their sums. float32."""

    def __init__(self, width: int, options: CDMoEOptions) -> None:
        super().__init__()
        self.side, self.top_k = math.isqrt(options.experts), options.top_k
        self.shape = (options.heads, 2, options.key_dim)
        self.query = nn.Linear(width, math.prod(self.shape), bias=False)
        self.keys = nn.Parameter(torch.empty(options.heads, 2, self.side, options.key_dim))
        nn.init.normal_(self.query.weight, std=width**-0.5)
        nn.init.normal_(self.keys, std=options.key_dim**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x `[N, D]` -> scores `[N, heads, k]` float32 and expert indices `[N, heads, k]`."""
        query = self.query(x.float()).unflatten(-1, self.shape)
        scores, index = torch.einsum("nhsd,hsed->nhse", query, self.keys).topk(self.top_k)
        pairs = (scores[:, :, 0, :, None] + scores[:, :, 1, None, :]).flatten(-2)
        grid = (index[:, :, 0, :, None] * self.side + index[:, :, 1, None, :]).flatten(-2)
        best, at = pairs.topk(self.top_k)
        return best, grid.gather(-1, at)


class PrivateExperts(nn.Module):
    """N experts of one neuron each: a row that reads, a row that writes (zero at the start)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(experts, width))
        self.up = nn.Parameter(torch.zeros(experts, width))
        nn.init.normal_(self.down, std=width**-0.5)

    def forward(self, x: torch.Tensor, scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x `[N, D]`, scores and index `[N, heads, k]` -> `[N, D]`."""
        index = index.flatten(1)
        found = torch.einsum("nd,ned->ne", x, F.embedding(index, self.down).to(x.dtype)).float()
        weight = F.silu(found * scores.flatten(1))
        return F.embedding_bag(index, self.up, per_sample_weights=weight.to(self.up.dtype), mode="sum").to(x.dtype)


@register
class CDMoE(ChannelMixer):
    """The teacher's MLP with private one-neuron experts beside it, found by product keys (Wonderful Matrices)."""

    name = "cdmoe"
    Options = CDMoEOptions
    options: CDMoEOptions
    float32_modules = ("product_keys",)

    def __init__(self, mlp: nn.Module, layer_idx: int, hidden_size: int, options: CDMoEOptions) -> None:
        super().__init__(mlp, layer_idx, hidden_size, options)
        self.product_keys = ProductKeys(hidden_size, options)
        self.private_experts = PrivateExperts(hidden_size, options.experts)

    def mix(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shared = self.shared(hidden_states)
        inputs = zip(hidden_states.flatten(0, -2).split(BLOCK), shared.flatten(0, -2).split(BLOCK), strict=True)
        if torch.is_grad_enabled():  # the gathered rows are recomputed, not kept
            blocks = [checkpoint(self.private, x, y, use_reentrant=False) for x, y in inputs]
        else:
            blocks = [self.private(x, y) for x, y in inputs]
        return shared + torch.cat(blocks).view_as(shared)

    def flops(self) -> float:
        experts = self.private_experts
        unread = 2 * (experts.down.numel() + experts.up.numel())
        found = self.options.heads * self.options.top_k
        return super().flops() - unread + 2 * found * 2 * self.hidden_size

    def private(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """The experts' part `[N, D]` for the MLP's inputs and outputs `[N, D]`."""
        with torch.autocast(x.device.type, enabled=False):  # scores stay in float32
            return self.private_experts(shared, *self.product_keys(x))
