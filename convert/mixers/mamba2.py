"""`mamba2`: the state-space dual of Mamba-2.

Source: Mamba-2 (arXiv 2405.21060); RoPE on B and C: Wonderful Matrices (arXiv 2407.16958).

    x, B, C = conv(v), SiLU(conv(k)), SiLU(conv(q))          causal, depthwise, 4 taps, starting as the identity
    dt_t = softplus(W_dt x_t + b)                            one per head
    S_t = exp(-dt_t e^{A_log}) S_{t-1} + dt_t B_t x_tᵀ,   y_t = S_tᵀ C_t + D x_t
    o_t = RMSNorm(y_t ⊙ SiLU(z_t))                           z low-rank, gate before norm

v, k, q stand for x, B, C (The Mamba in the Llama, arXiv 2408.15237). SiLU, as in `gla`, makes most weights positive, as
softmax's are. With weights of both signs the mean of all values is out of reach: the start is worse, much so in the
pure form, and small models trained on recall from nothing stay at chance for long. x has no SiLU, which the teacher's v
does not know. With `rope`, which turns B and C after their SiLU, the conv and D may be dropped. D starts at 0; without
a window calibration sets it by least squares.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.calibration import least_squares
from linearize.convert.mixers.base import register
from linearize.convert.mixers.hybrid import DecayOptions, Hybrid, Recurrence, Tokens
from linearize.convert.mixers.parts import CausalConv, HeadNorm, Linear, decay_rate, inverse_softplus
from linearize.kernels.gate_prep import softplus_gate


class Mamba2Options(DecayOptions):
    """Options of `mamba2`."""

    rank: int = Field(16, ge=1, description="rank of the output gate")
    rope: bool = Field(False, description="whether B and C carry RoPE, after their SiLU")
    conv: int = Field(4, ge=0, description="taps of the short convolution of x, B and C; 0 drops it")
    D: bool = Field(True, description="whether the feedthrough D is there")


class StateSpaceDual(Recurrence):
    """Linear attention with a scalar decay that is tied to the step size."""

    def __init__(self, spec: AttentionSpec, options: Mamba2Options, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        self.options = options
        self.conv = CausalConv(3 * spec.num_heads * spec.head_dim, options.conv) if options.conv else None
        self.step = Linear(spec.hidden_size, spec.num_heads)
        nn.init.zeros_(self.step.weight)
        self.A_log = nn.Parameter(torch.zeros(spec.num_heads))
        self.D = nn.Parameter(torch.zeros(spec.num_heads)) if options.D else None
        self.norm = HeadNorm(spec, "swish", options.rank, order="gate_then_norm")
        self.set_half_life(options.half_lives(spec.num_heads))

    @torch.no_grad()
    def set_half_life(self, tokens: torch.Tensor) -> None:
        """tokens `[H]`."""
        self.step.bias.copy_(inverse_softplus(decay_rate(tokens)))

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        y, v, new_state = self.scan(tokens, state)
        if self.D is not None:
            y = y + self.D[:, None].to(v.dtype) * v
        return self.norm(y, tokens.x), new_state

    def scan(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, torch.Tensor, State]:
        """The state's output and the convolved v, both `[B, T, H, V]`, and the next state."""
        q, k, v = tokens.q, tokens.k, tokens.v
        new_state: State = {}
        if self.conv is not None:
            qkv = torch.cat([q, k, v], -1)
            past = None if state is None else state["conv"]
            flat, new_state["conv"] = self.conv(qkv.flatten(-2), past, tokens.cu_seqlens)
            q, k, v = flat.view_as(qkv).chunk(3, -1)
        q, k = F.silu(q), F.silu(k)
        if self.options.rope:
            q, k = tokens.rotate(q, k)
        log_decay, step = softplus_gate(self.step.product(tokens.x), self.A_log, self.step.bias)
        k = (k * step[..., None]).to(k.dtype)
        y, new_state["memory"] = tokens.linear_attention(q, k, v, log_decay, state)
        return y, v, new_state

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().state_shapes()
        if self.conv is not None:
            shapes["conv"] = (self.options.conv - 1, 3 * self.spec.num_heads * self.spec.head_dim)
        return shapes

    @torch.no_grad()
    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        self.set_half_life(self.options.half_lives_after(lookback, 1)[:, 0])
        if self.D is not None and not self.options.window:
            y, v, _ = self.scan(tokens, None)
            on_state, on_value = least_squares([y, v], heads).unbind(-1)
            self.D.copy_(torch.where(on_state > 0, on_value / on_state, 0))


@register
class StateSpace(Hybrid):
    """Mamba-2's state-space dual (SSD), with RoPE, short convolution and feedthrough as options."""

    name = "mamba2"
    Options = Mamba2Options
    recurrence_class = StateSpaceDual
