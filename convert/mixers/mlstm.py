"""`mlstm`: exponential input gates, with the sum of the weights as denominator.

Source: xLSTM (arXiv 2405.04517).

    q̂, k̂ = SiLU(A_q q), SiLU(A_k k);   i_t = cap(w_i x_t + u k_t + b_i),   f_t = cap(w_f x_t + b_f)
    C_t = σ(f_t) C_{t-1} + e^{i_t} k̂_t v_tᵀ,   n_t = σ(f_t) n_{t-1} + e^{i_t} k̂_t
    y_t = C_tᵀ q̂_t / max(|n_tᵀ q̂_t|, 1),   o_t = σ(g_t) ⊙ RMSNorm(y_t)                      g low-rank

cap(z) = 15 tanh(z / 15) is xLSTM-7B's (arXiv 2503.13427). The input gate reads the teacher's key besides x, since the
mean query says what a softmax would on average give each key: calibration tries shares of it as u, after the
half-lives and head by head. b_i starts where the sum of weights, not the 1, divides.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.mixers.base import register
from linearize.convert.mixers.hybrid import DecayOptions, Hybrid, Recurrence, Tokens
from linearize.convert.mixers.parts import HeadMap, HeadNorm, Linear, decay_rate, inverse_logsigmoid, is_step
from linearize.kernels.mlstm import mlstm, mlstm_step

CAP = 15.0
SKIP = 1e4
"""A forget gate of it and an input gate of minus it pass over a token."""


class MLSTMOptions(DecayOptions):
    """Options of `mlstm`."""

    rank: int = Field(16, ge=1, description="rank of the output gate")
    rope: bool = Field(False, description="whether q and k carry RoPE")


class MatrixLSTM(Recurrence):
    """Maps and SiLU of q and k, gates, the kernel, norm and output gate."""

    def __init__(self, spec: AttentionSpec, options: MLSTMOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        shape = (spec.num_heads, spec.head_dim)
        self.options = options
        self.q_map, self.k_map = HeadMap(*shape), HeadMap(*shape)
        self.gates = Linear(spec.hidden_size, 2 * spec.num_heads, bias=False)
        self.key_weight = nn.Parameter(torch.zeros(shape))
        self.input_bias = nn.Parameter(torch.full((spec.num_heads,), 4.0))
        self.forget_bias = nn.Parameter(_forget_bias(options.half_lives(spec.num_heads)))
        self.norm = HeadNorm(spec, "sigmoid", options.rank)
        nn.init.zeros_(self.gates.weight)

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        i, f = self.gates(tokens.x).chunk(2, -1)
        i = _capped(i + (self.key_weight * tokens.k).sum(-1) + self.input_bias)
        f = _capped(f + self.forget_bias)
        q, k = self.q_map(tokens.q), self.k_map(tokens.k)
        if self.options.rope:
            q, k = tokens.rotate(q, k)
        if tokens.mask is not None:  # k is 0 at padding
            i, f = (z.masked_fill(~tokens.mask[..., None], skip) for z, skip in ((i, -SKIP), (f, SKIP)))
        q, k, v = F.silu(q), F.silu(k), tokens.v
        before = None if state is None else (state["maximum"], state["memory"], state["normaliser"])
        if state is not None and before is not None and is_step(q, state):
            y = mlstm_step(q[:, 0], k[:, 0], v[:, 0], i[:, 0], f[:, 0], before)[:, None]
            return self.norm(y, tokens.x), state
        y, after = mlstm(
            q,
            k,
            v,
            i,
            f,
            initial_state=before,
            output_final_state=True,
            cu_seqlens=tokens.cu_seqlens,
        )
        assert after is not None
        maximum, memory, normaliser = after
        new_state = {"maximum": maximum, "memory": memory, "normaliser": normaliser}
        return self.norm(y, tokens.x), new_state

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        heads, width = self.spec.num_heads, self.spec.head_dim
        return {"maximum": (heads,), **super().state_shapes(), "normaliser": (heads, width)}

    def starts(self, tokens: Tokens, lookback: torch.Tensor) -> list[list[dict[str, torch.Tensor]]]:
        half_lives = self.options.half_lives_to_try(lookback, 1)
        mean_query = self.spec.scaling * tokens.q.mean((0, 1))
        return [
            [{"forget_bias": _forget_bias(half_life[:, 0])} for half_life in half_lives],
            [{"key_weight": share * mean_query} for share in (0.3, 0.1, 1.0)],
        ]


def _capped(z: torch.Tensor) -> torch.Tensor:
    return CAP * torch.tanh(z / CAP)


def _forget_bias(half_life: torch.Tensor) -> torch.Tensor:
    return inverse_logsigmoid(-decay_rate(half_life))


@register
class MLSTM(Hybrid):
    """Exponential input gates over a matrix memory, divided by the sum of its weights (mLSTM of xLSTM)."""

    name = "mlstm"
    Options = MLSTMOptions
    recurrence_class = MatrixLSTM
