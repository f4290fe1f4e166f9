"""LoRA with cross-entropy and KL against the zero-copy teacher.

The teacher is the same frozen base with the adapters off and softmax on: no second copy in memory.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from linearize.convert.surgery import as_teacher
from linearize.distill.adapters import adapters_off
from linearize.distill.losses import distillation_loss


class Lora(BaseModel):
    """Settings of the stage."""

    model_config = ConfigDict(extra="forbid")

    tokens: int = Field(100_000, ge=0, description="tokens to train on")
    batch_size: int | None = Field(None, ge=1, description="sequences per step; none: by the number of tokens")
    learning_rate: float = Field(1e-3, gt=0, description="highest rate of the adapters")
    new_learning_rate: float | None = Field(
        3e-3, description="highest rate of the mixers' new tensors; none freezes them"
    )
    rank: int = Field(32, ge=1, description="rank of the adapters")
    alpha: int = Field(64, ge=1, description="scale of the adapters: alpha / rank")
    ce_weight: float = Field(0.02, ge=0, description="weight of the cross-entropy with the text")
    kl_weight: float = Field(1.0, ge=0, description="weight of the KL divergence from the teacher")


class LoraObjective(nn.Module):
    """`ce_weight · CE + kl_weight · KL(teacher ‖ student)`, means over tokens."""

    def __init__(self, student: nn.Module, ce_weight: float, kl_weight: float) -> None:
        super().__init__()
        self.student = student
        self.ce_weight, self.kl_weight = ce_weight, kl_weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids `[B, T]` -> scalar loss."""
        with torch.no_grad():
            teacher = teacher_logits(self.student, input_ids)
        logits = self.student(input_ids=input_ids, use_cache=False).logits
        loss, _, _ = distillation_loss(
            logits[:, :-1].flatten(0, 1),
            teacher[:, :-1].flatten(0, 1),
            input_ids[:, 1:].flatten(),
            self.ce_weight,
            self.kl_weight,
        )
        return loss


def teacher_logits(student: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """The teacher's logits `[B, T, vocab]`, from the student's own tensors."""
    with as_teacher(student), adapters_off(student):
        return student(input_ids=input_ids, use_cache=False).logits
