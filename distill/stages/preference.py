"""Direct preference optimisation (DPO, arXiv 2305.18290): make preferred answers likelier than the others.

    -log σ( β [ (log π(chosen) - log π_ref(chosen)) - (log π(rejected) - log π_ref(rejected)) ] )

log π sums over the answer's tokens. The reference is the student as the stage found it, which is the student with the
stage's adapters off, so it takes no memory. Data has TRL's format: JSON lines with `prompt`, `chosen`, `rejected`.
The loss is computed here, not by TRL's trainer, which does not resume to the exact step and would hold a second model.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import nn

from linearize.convert.errors import ConversionError
from linearize.distill.adapters import adapters_off, merge_adapters
from linearize.distill.conversations import Examples, encode_completion, pad, preferences_of, read_lines
from linearize.distill.data import TokenBlocks
from linearize.distill.objectives import IGNORED, token_log_probs
from linearize.distill.parameters import Group
from linearize.distill.reference import Head, check_head, last_hidden
from linearize.distill.stages.base import AdapterStage, Workbench, rates


class Preference(AdapterStage):
    """The student learns to prefer chosen answers to rejected ones (DPO)."""

    examples: ClassVar[bool] = True
    example_shape: ClassVar[tuple[int, ...]] = (2, 2)

    kind: Literal["preference"] = "preference"
    data: str | None = Field(
        None, description="JSON lines with prompt, chosen, rejected; none: made from the recipe's text"
    )
    learning_rates: dict[Group, float] = rates(adapters=1e-4)
    beta: float = Field(0.01, gt=0, description="how strongly the student is held to where it started")

    @field_validator("learning_rates")
    @classmethod
    def _adapters_alone(cls, rates: dict[Group, float]) -> dict[Group, float]:
        if set(rates) != {"adapters"}:
            raise ValueError("only 'adapters' can train: without them the student is its own reference")
        return rates

    def ready(self, bench: Workbench) -> None:
        merge_adapters(bench.student)
        super().ready(bench)

    def objective(self, bench: Workbench) -> nn.Module:
        check_head(bench.student)
        return PreferenceObjective(bench.student, self.beta)

    def load_examples(self, documents: list[str], tokenizer: Any, context: int, count: int, seed: int) -> TokenBlocks:
        rows = read_lines(self.data, ("prompt", "chosen", "rejected")) if self.data else preferences_of(documents, seed)
        made = []
        for row in rows:
            answers = (encode_completion(row["prompt"], row[kind], tokenizer) for kind in ("chosen", "rejected"))
            pair = torch.stack([pad(*answer, context) for answer in answers])
            if bool((pair[:, 1, 1:] != IGNORED).any(-1).all()):
                made.append(pair)
            if len(made) == count:
                break
        if not made:
            raise ConversionError(f"{self.label}: no answer begins within {context} tokens of any example")
        return Examples(torch.stack(made))


class PreferenceObjective(nn.Module):
    """The DPO loss, the mean over pairs."""

    def __init__(self, student: Any, beta: float) -> None:
        super().__init__()
        self.student, self.beta = student, beta

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """batch `[B, 2, 2, T]`: chosen and rejected, each ids and labels -> scalar loss."""
        pairs = batch.flatten(0, 1)
        with torch.no_grad(), adapters_off(self.student):
            reference = self._log_probs(pairs)
        chosen, rejected = (self._log_probs(pairs) - reference).view(-1, 2).unbind(1)
        return -F.logsigmoid(self.beta * (chosen - rejected)).mean()

    def _log_probs(self, pairs: torch.Tensor) -> torch.Tensor:
        """Log-probability `[N]` of every answer; pairs `[N, 2, T]` of ids and labels."""
        ids, labels = pairs.unbind(1)
        hidden = last_hidden(self.student, ids)[:, :-1]
        found = token_log_probs(hidden.flatten(0, 1), Head.of(self.student), labels[:, 1:].flatten())
        return found.view(len(pairs), -1).sum(-1)
