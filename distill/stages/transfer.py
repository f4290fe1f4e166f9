"""Attention transfer: every mixer learns, in its own layer, what the teacher's attention did there.

One pass of the teacher through the student's body gives each mixer its input and its target; the teacher's output
goes on to the next layer, so that all layers train at once and none sees another's mistakes. (LoLCATs,
arXiv 2410.10254; RADLADS, arXiv 2505.03005.)
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.calibration import routed, teacher_heads
from linearize.convert.mixers import Mixer
from linearize.convert.surgery import student_mixers
from linearize.distill.losses import normalized_error


class Transfer(BaseModel):
    """Settings of the stage."""

    model_config = ConfigDict(extra="forbid")

    tokens: int = Field(200_000, ge=0, description="tokens to train on")
    batch_size: int | None = Field(None, ge=1, description="sequences per step; none: by the number of tokens")
    learning_rate: float = Field(1e-2, gt=0, description="highest rate of the mixers' new tensors")
    adapter_learning_rate: float | None = Field(
        3e-3, description="highest rate of LoRA on the projections during this stage; none leaves them out"
    )


class TransferObjective(nn.Module):
    """Mean over layers of `‖W_o(mine) - W_o(teacher's)‖² / ‖W_o(teacher's)‖²`."""

    def __init__(self, student: PreTrainedModel) -> None:
        super().__init__()
        self.student = student
        self.layer_errors: list[float] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids `[B, T]` -> scalar loss, differentiable in the mixers' tensors."""
        losses: list[torch.Tensor] = []

        def route(mixer: Mixer, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
            with torch.no_grad():
                target, _ = teacher_heads(mixer, hidden_states, **kwargs)
            with torch.enable_grad():
                heads, _ = mixer.mix(hidden_states, kwargs.get("position_embeddings"), None, None)
                losses.append(normalized_error(mixer.output(heads.to(hidden_states.dtype)), target))
            return target, None

        with torch.no_grad(), routed(student_mixers(self.student), route):
            self.student.get_decoder()(input_ids=input_ids, use_cache=False)
        stacked = torch.stack(losses)
        self.layer_errors = stacked.detach().tolist()
        return stacked.mean()
