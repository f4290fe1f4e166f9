"""Context extension: training on sequences longer than before, with the text's own next tokens.

The teacher may not reach so far, so cross-entropy alone is the default. (RADLADS, arXiv 2505.03005, stage 3: 16K.)
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from linearize.distill.parameters import Group
from linearize.distill.stages.base import Workbench, rates
from linearize.distill.stages.logits import Distill


class Context(Distill):
    """The student learns to read longer sequences."""

    beyond_teacher: ClassVar[bool] = True

    kind: Literal["context"] = "context"
    context: int | None = Field(4096, ge=2, description="tokens per sequence; none: the recipe's")
    learning_rates: dict[Group, float] = rates(new=1e-4, all=1e-5)
    ce_weight: float = Field(1.0, ge=0, description="weight of the cross-entropy with the text")
    kl_weight: float = Field(0.0, ge=0, description="weight of the KL divergence from the teacher")

    def objective(self, bench: Workbench) -> nn.Module:
        config = bench.student.config
        known = getattr(config, "max_position_embeddings", None) or 0
        config.max_position_embeddings = max(known, bench.data.length)
        return super().objective(bench)
