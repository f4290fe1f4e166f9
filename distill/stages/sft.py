"""Supervised fine-tuning on conversations: cross-entropy of the assistant's tokens alone.

`data` is a JSON-lines file with `messages`; the tokenizer's chat template writes them out (a plain one if it has none).
Without data of its own, passages of the recipe's text stand in: their beginnings asked for, their ends learned.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from linearize.convert.errors import ConversionError
from linearize.distill.conversations import Examples, conversations_of, encode_messages, pad, read_lines
from linearize.distill.data import TokenBlocks
from linearize.distill.objectives import IGNORED, DistillObjective
from linearize.distill.parameters import Group
from linearize.distill.reference import check_head
from linearize.distill.stages.base import AdapterStage, Workbench, rates


class Sft(AdapterStage):
    """The student learns to answer as the assistant of given conversations does."""

    examples: ClassVar[bool] = True
    example_shape: ClassVar[tuple[int, ...]] = (2,)

    kind: Literal["sft"] = "sft"
    data: str | None = Field(None, description="JSON lines with `messages`; none: made from the recipe's text")
    learning_rates: dict[Group, float] = rates(new=1e-4, all=2e-5)

    def objective(self, bench: Workbench) -> nn.Module:
        check_head(bench.student)
        return DistillObjective(bench.student, bench.reference(), ce_weight=1.0, kl_weight=0.0)

    def load_examples(self, documents: list[str], tokenizer: Any, context: int, count: int, seed: int) -> TokenBlocks:
        rows = [row["messages"] for row in read_lines(self.data, ("messages",))] if self.data else None
        made = []
        for messages in rows or conversations_of(documents):
            example = pad(*encode_messages(messages, tokenizer), context)
            if bool((example[1, 1:] != IGNORED).any()):
                made.append(example)
            if len(made) == count:
                break
        if not made:
            raise ConversionError(f"{self.label}: no assistant's token stands within {context} tokens of any example")
        return Examples(torch.stack(made))
