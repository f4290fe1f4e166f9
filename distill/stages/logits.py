"""Logit distillation: the student learns the teacher's predictions, by default with every parameter.

The teacher is the student's own, a larger one of the same vocabulary, or what either said, kept on disk.
(RADLADS, arXiv 2505.03005, stage 2; MOHAWK, arXiv 2408.10189, stage 3.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.checkpoint import check_source, load_teacher, resolve_source
from linearize.convert.errors import ConversionError
from linearize.distill.cached_logits import CachedLogits, cached_kl, write_cache
from linearize.distill.objectives import DistillObjective
from linearize.distill.parameters import Group
from linearize.distill.reference import Head, Reference, check_head, last_hidden
from linearize.distill.stages.base import Stage, Workbench, rates
from linearize.kernels.linear_loss import linear_cross_entropy


class Distill(Stage):
    """What all stages share that learn a teacher's predictions."""

    ce_weight: float = Field(0.0, ge=0, description="weight of the cross-entropy with the text")
    kl_weight: float = Field(1.0, ge=0, description="weight of the KL divergence from the teacher")
    direction: Literal["forward", "reverse"] = Field(
        "forward", description="forward: KL(teacher | student); reverse: KL(student | teacher)"
    )
    temperature: float = Field(1.0, gt=0, description="both distributions of the KL are softmax(logits / temperature)")

    def objective(self, bench: Workbench) -> nn.Module:
        return self.distillation(bench, bench.reference())

    def distillation(self, bench: Workbench, reference: Reference) -> nn.Module:
        """CE + KL towards a live teacher."""
        check_head(bench.student)
        return DistillObjective(
            bench.student, reference, self.ce_weight, self.kl_weight, self.direction, self.temperature
        )


class Logits(Distill):
    """The student learns the teacher's next-token distributions, with every parameter."""

    kind: Literal["logits"] = "logits"
    learning_rates: dict[Group, float] = rates(new=1e-3, all=1e-4)
    teacher: str | None = Field(
        None, description="another, larger teacher of the same vocabulary, folder or Hub id; none: the student's own"
    )
    top_k: int | None = Field(
        None, ge=1, description="learn from this many likeliest tokens, written to disk first; none: a live teacher"
    )
    cache: str | None = Field(None, description="folder of those tokens, to be kept; none: with the run's own files")

    @model_validator(mode="after")
    def _cached(self) -> Logits:
        if self.cache is not None and self.top_k is None:
            raise ValueError("cache needs top_k, the number of tokens it holds")
        if self.top_k is not None and (self.direction == "reverse" or self.temperature != 1):
            raise ValueError("top_k goes with direction forward and temperature 1 only")
        return self

    def check(self, student: PreTrainedModel) -> None:
        if self.teacher is None:
            return
        theirs = check_source(resolve_source(self.teacher)).vocab_size
        if theirs != student.config.vocab_size:
            raise ConversionError(
                f"stage {self.label}: teacher = {self.teacher!r} has {theirs} tokens in its vocabulary, the student "
                f"{student.config.vocab_size}; its logits cannot be learned"
            )

    def check_documents(self) -> None:
        if self.top_k is not None:
            raise ConversionError(f"stage {self.label} keeps top_k of running text; documents must be 'joined'")

    def objective(self, bench: Workbench) -> nn.Module:
        if self.top_k is None:
            return self.distillation(bench, self.reference(bench))
        k = min(self.top_k, bench.student.config.vocab_size)
        folder = Path(self.cache) if self.cache else bench.state.with_suffix(".top_k")
        write_cache(folder, _batches(bench), self.reference(bench), k, bench.steps)
        return CachedObjective(bench.student, CachedLogits(folder, k), self.ce_weight, self.kl_weight)

    def reference(self, bench: Workbench) -> Reference:
        """The teacher of this stage."""
        if self.teacher is None:
            return bench.reference()
        teacher = load_teacher(self.teacher, bench.student.dtype, bench.student.device)
        check_head(teacher)
        return Reference(bench.student, teacher.requires_grad_(False))


def _batches(bench: Workbench) -> Iterator[torch.Tensor]:
    for step in range(bench.steps):
        yield bench.data.batch(step, bench.batch_size, bench.seed)


class CachedObjective(nn.Module):
    """`ce_weight · CE + kl_weight · KL` with the teacher's likeliest tokens from disk."""

    def __init__(self, student: nn.Module, cache: CachedLogits, ce_weight: float, kl_weight: float) -> None:
        super().__init__()
        self.student, self.cache = student, cache
        self.ce_weight, self.kl_weight = ce_weight, kl_weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids `[B, T]` -> scalar loss."""
        hidden = last_hidden(self.student, input_ids)[:, :-1].flatten(0, 1)
        head = Head.of(self.student)  # type: ignore[arg-type]
        loss = self.kl_weight * cached_kl(hidden, head, *self.cache(input_ids))
        if self.ce_weight:
            labels = input_ids[:, 1:].flatten()
            loss = loss + self.ce_weight * linear_cross_entropy(
                hidden, head.weight, labels, bias=head.bias, softcap=head.softcap, logit_scale=head.scale
            )
        return loss
