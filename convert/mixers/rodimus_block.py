"""`rodimus-block`: the whole Rodimus block of the paper, one head twice as wide as the model, in place of attention.

Source: Rodimus* (arXiv 2410.06577). With D_i = 2D and a state of n = 64 rows, for the block's input h:

    [x, z]  = W_fc h
    x'      = SiLU(conv(x))                             causal, depthwise, 4 taps, with bias
    [q, k]  = W_qk x'
    v       = σ(W_2 W_1 x + b_2) ⊙ x
    [a, b]  = W_m x' + bias;  log α = -softplus(a) · σ(b);  k̂ = k / ‖k‖ ⊙ softplus(a)^σ(b)
    S_t     = diag(α_t) S_{t-1} + k̂_t v_tᵀ
    y       = n^-½ S_tᵀ q_t + d ⊙ x'
    heads   = W_out RMSNorm(y ⊙ SiLU(z))

The teacher's output projection follows, and a window of the teacher's softmax stands beside it (see `hybrid.py`).
Calibration takes what the form can hold of the teacher: the first channels of x are its v; further ones, in pairs of
both signs (SiLU(a) - SiLU(-a) = a), give the q and k whose products are nearest to the sum of its heads' products;
W_out is the ridge regression of the teacher's heads. `load_released` reads a block of the released models.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.errors import ConversionError
from linearize.convert.mixers.base import register
from linearize.convert.mixers.hybrid import DecayOptions, Hybrid, Recurrence, Tokens
from linearize.convert.mixers.parts import CausalConv, Linear, decay_rate, inverse_softplus
from linearize.kernels.gate_prep import ddts_gates
from linearize.kernels.norm_gate import norm_gate

RELEASED = {
    "fc.weight": "fc.weight",
    "act_norm.weight": "norm",
    "out_proj.weight": "out.weight",
    "inner_mixer.residual_weight": "feedthrough",
    "inner_mixer.short_conv.conv1d.weight": "conv.weight",
    "inner_mixer.short_conv.conv1d.bias": "conv.bias",
    "inner_mixer.in_proj.weight": "qk.weight",
    "inner_mixer.ch_gate_proj.0.weight": "value_down.weight",
    "inner_mixer.ch_gate_proj.1.weight": "value_up.weight",
    "inner_mixer.ch_gate_proj.1.bias": "value_up.bias",
    "inner_mixer.mem_gate_proj.weight": "gates.weight",
    "inner_mixer.mem_gate_proj.bias": "gates.bias",
}
"""Tensors of a released model's `layers.{i}.mixer` and where they stand in `RodimusBlockRecurrence`."""
RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Penalties that W_out's regression chooses from, relative to the mean square of what it reads."""


class RodimusBlockOptions(DecayOptions):
    """Options of `rodimus-block`."""

    rows: int = Field(64, ge=1, description="rows n of the state, the width of its one head's q and k")
    expand: int = Field(2, ge=1, description="width of the state's values in widths of the model, D_i / D")
    conv: int = Field(4, ge=1, description="taps of the short convolution")
    rank: int | None = Field(None, ge=1, description="rank of the value gate; none: D / 64, at least 16")


class RodimusBlockRecurrence(Recurrence):
    """The block up to the teacher's output projection. float32."""

    def __init__(self, spec: AttentionSpec, options: RodimusBlockOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        self.options = options
        width, self.inner = spec.hidden_size, options.expand * spec.hidden_size
        rank = options.rank or max(width // 64, 16)
        self.fc = Linear(width, 2 * self.inner, bias=False)
        self.conv = CausalConv(self.inner, options.conv)
        self.qk = Linear(self.inner, 2 * options.rows, bias=False)
        self.value_down = Linear(self.inner, rank, bias=False)
        self.value_up = Linear(rank, self.inner)
        self.gates = Linear(self.inner, 2 * options.rows)
        self.feedthrough = nn.Parameter(torch.ones(self.inner))
        self.norm = nn.Parameter(torch.ones(self.inner))
        self.out = Linear(self.inner, spec.num_heads * spec.head_dim, bias=False)
        for linear in (self.fc, self.qk, self.value_down, self.out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        for linear in (self.value_up, self.gates):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.set_half_lives(options.half_lives(options.rows))

    @torch.no_grad()
    def set_half_lives(self, tokens: torch.Tensor) -> None:
        """Bias the gates so that the state's rows halve in `tokens` `[n]` tokens (at temperature 1/2)."""
        rate = 2 * decay_rate(tokens).to(self.gates.bias)
        self.gates.bias.copy_(torch.cat([inverse_softplus(rate), torch.zeros_like(rate)]))

    def features(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        """What W_out reads, `[B, T, D_i]`, and the state."""
        x, z = self.fc(tokens.x).chunk(2, -1)
        past = None if state is None else state["conv"]
        inside, past = self.conv(x, past, tokens.cu_seqlens, activation="silu")
        v = torch.sigmoid(self.value_up.rounded(self.value_down(x))) * x
        projections = (*self.qk(inside).chunk(2, -1), *self.gates.product(inside).chunk(2, -1))
        q, k, a, b = (t[:, :, None] for t in projections)  # one head
        a_bias, b_bias = self.gates.bias[None].chunk(2, -1)
        log_decay, k = ddts_gates(a, b, k, a_bias=a_bias, b_bias=b_bias)
        o, memory = tokens.linear_attention(q, k, v[:, :, None], log_decay, state)
        y = o[:, :, 0] + self.feedthrough.to(o.dtype) * inside
        return norm_gate(y, self.norm, z, order="gate_then_norm"), {"memory": memory, "conv": past}

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        features, new_state = self.features(tokens, state)
        return self.out(features).unflatten(-1, (self.spec.num_heads, -1)), new_state

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"memory": (1, self.options.rows, self.inner), "conv": (self.options.conv - 1, self.inner)}

    @torch.no_grad()
    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        self.set_half_lives(self.options.half_lives_after(lookback.mean()[None], self.options.rows)[0])
        inputs = tokens.x.flatten(0, 1)
        v = ridge_regression(inputs, tokens.v.flatten(0, 1).flatten(1))[: self.inner]
        self.fc.weight[: len(v)] = v
        self._take_products(tokens, inputs, len(v))
        features, _ = self.features(tokens, None)
        self.out.weight.copy_(validated_regression(features.flatten(0, 1), heads.flatten(0, 1).flatten(1)))

    def _take_products(self, tokens: Tokens, inputs: torch.Tensor, first: int) -> None:
        """Channels of x from `first` on: ±q and ±k of the form nearest to `Σ_h W_q^h W_k^hᵀ`, as many as fit."""
        rows = min(self.options.rows, (self.inner - first) // 4, self.spec.hidden_size)
        wq, wk = (ridge_regression(inputs, t.flatten(0, 1).flatten(1)) for t in (tokens.q, tokens.k))  # each [H·K, D]
        left, strength, right = torch.linalg.svd(wq.T @ wk)
        root = strength[:rows].sqrt()[:, None]
        q, k = root * left.T[:rows], root * right[:rows]
        self.fc.weight[first : first + 4 * rows] = torch.cat([q, -q, k, -k])
        pick = torch.zeros_like(self.qk.weight)
        at = torch.arange(rows, device=pick.device)
        for offset, sign, place in ((0, 1, 0), (1, -1, 0), (2, 1, 1), (3, -1, 1)):
            pick[at + place * self.options.rows, first + at + offset * rows] = sign
        if rows < self.options.rows:  # rows of the state that found no channel keep their random start
            for place in (0, 1):
                rest = slice(place * self.options.rows + rows, (place + 1) * self.options.rows)
                pick[rest] = self.qk.weight[rest]
        self.qk.weight.copy_(pick)


def ridge_regression(x: torch.Tensor, y: torch.Tensor, ridge: float = 1e-4) -> torch.Tensor:
    """W `[E, D]` that minimises `‖x Wᵀ - y‖²` plus a penalty, for x `[N, D]` and y `[N, E]`."""
    gram = x.T @ x
    eye = torch.eye(len(gram), device=x.device)
    return torch.linalg.solve(gram + ridge * gram.diagonal().mean().clamp_min(1e-12) * eye, x.T @ y).T


def validated_regression(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`ridge_regression` with the penalty whose fit of the first three quarters is nearest to y on the last one."""
    fit = len(x) * 3 // 4
    errors = [
        float((x[fit:] @ ridge_regression(x[:fit], y[:fit], ridge).T - y[fit:]).square().sum()) for ridge in RIDGES
    ]
    return ridge_regression(x, y, RIDGES[errors.index(min(errors))])


@register
class RodimusBlock(Hybrid):
    """The paper's own Rodimus block, one wide head with its own projections, beside a window (Rodimus)."""

    name = "rodimus-block"
    Options = RodimusBlockOptions
    recurrence_class = RodimusBlockRecurrence
    recurrence: RodimusBlockRecurrence

    @torch.no_grad()
    def load_released(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over one block of a released Rodimus model; without a window it then computes what that block does.

        Args:
            tensors: of `layers.{i}.mixer`, without that prefix. The released block's output projection ends in the
                model's width, so W_out becomes the teacher's projection undone, times it.

        Raises:
            ConversionError: a tensor is missing, unknown or of another shape, or the teacher's output projection
                has a bias or cannot be undone.
        """
        if missing := sorted(set(RELEASED) ^ set(tensors)):
            raise ConversionError(f"not the tensors of a released Rodimus block: {missing[0]} is missing or unknown")
        projection = self.get_submodule(self.spec.output_name)
        weight = projection.weight.double()
        if projection.bias is not None or torch.linalg.matrix_rank(weight) < len(weight):
            raise ConversionError(f"{self.spec.output_name} of this teacher has a bias or cannot be undone")
        for theirs, ours in RELEASED.items():
            tensor, target = tensors[theirs], self.recurrence.get_parameter(ours)
            if theirs == "out_proj.weight":
                tensor = torch.linalg.pinv(weight) @ tensor.double()
            if tensor.numel() != target.numel() or len(tensor) != len(target):
                raise ConversionError(
                    f"{theirs} is {list(tensors[theirs].shape)}, but this block needs {list(target.shape)}; "
                    "give the released model's rows, expand, conv and rank"
                )
            target.copy_(tensor.view_as(target))
        self.branch.scale.fill_(1.0)
