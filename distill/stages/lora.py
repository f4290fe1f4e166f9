"""LoRA with cross-entropy and KL against the zero-copy teacher.

The teacher is the same frozen base with the adapters off and softmax on: no second copy in memory.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from linearize.distill.objectives import DistillObjective
from linearize.distill.parameters import Group
from linearize.distill.stages.base import AdapterStage, Workbench, rates


class Lora(AdapterStage):
    """Adapters and the mixers' new tensors learn the teacher's predictions and the text."""

    kind: Literal["lora"] = "lora"
    learning_rates: dict[Group, float] = rates(new=3e-3, adapters=1e-3)
    ce_weight: float = Field(0.02, ge=0, description="weight of the cross-entropy with the text")
    kl_weight: float = Field(1.0, ge=0, description="weight of the KL divergence from the teacher")

    def objective(self, bench: Workbench) -> nn.Module:
        return DistillObjective(bench.student, bench.reference(), self.ce_weight, self.kl_weight)
