"""`liger`: gated linear attention out of the teacher's keys, with no new parameter, beside half a window.

Source: Liger (arXiv 2503.01496).

    log a_t = logsigmoid(Pool(k_t)) / 16,   S_t = diag(a_t) S_{t-1} + softmax(k_t) v_tᵀ
    o_t = ½ window_t + ½ S_tᵀ softmax(q_t)

softmax runs over a head's channels; q and k are without RoPE. Pool averages the keys to the width of the gate, which
is their own width here as in the released code, so it leaves them as they are. `mix: learned` replaces the halves by
the learned mix of the other mixers, which starts close to the window instead of at half of it.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.calibration import CalibrationSample
from linearize.convert.mixers.base import register
from linearize.convert.mixers.hybrid import Branch, Hybrid, HybridOptions, Recurrence, Tokens

TEMPERATURE = 16.0


class LigerOptions(HybridOptions):
    """Options of `liger`."""

    mix: Literal["half", "learned"] = Field(
        "half", description="half: ½ window + ½ recurrence, no new parameter; learned: the mix of the other mixers"
    )


class PooledKeyRecurrence(Recurrence):
    """Linear attention whose vector decay is read off the key."""

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        log_decay = F.logsigmoid(tokens.k.float()) / TEMPERATURE
        q, k = tokens.q.softmax(-1), tokens.k.softmax(-1)
        o, memory = tokens.linear_attention(q, k, tokens.v, log_decay, state)
        return o, {"memory": memory}


class Halves(Branch):
    """½ window + ½ recurrence; the recurrence alone where there is no window."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def alone(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def forward(self, y: torch.Tensor, window: torch.Tensor, x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return torch.lerp(window.to(y.dtype), y, 0.5)


@register
class Liger(Hybrid):
    """Gated linear attention from pooled keys, without new parameters, beside half a window (Liger)."""

    name = "liger"
    Options = LigerOptions
    options: LigerOptions
    recurrence_class = PooledKeyRecurrence

    def __init__(self, spec: AttentionSpec, attention: nn.Module, layer_idx: int, options: LigerOptions) -> None:
        super().__init__(spec, attention, layer_idx, options)
        if options.mix == "half":
            self.branch = Halves()

    def calibrate(self, sample: CalibrationSample) -> None:
        if self.options.mix == "learned":
            super().calibrate(sample)
