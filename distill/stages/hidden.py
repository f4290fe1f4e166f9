"""Hidden-state alignment: the student's blocks towards the teacher's residual stream.

The second of MOHAWK's stages (arXiv 2408.10189). Teacher-forced, every block reads what the teacher's block read and
learns its output, MLP included. Otherwise the student runs by itself, and gradients cross its layers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.attention_spec import find_layers
from linearize.distill.capture import watch_blocks
from linearize.distill.layout import real_tokens, token_ids
from linearize.distill.losses import normalized_error
from linearize.distill.parameters import Group
from linearize.distill.reference import Reference, last_hidden
from linearize.distill.stages.base import Stage, Workbench, rates


class Hidden(Stage):
    """Every block learns the hidden states that the teacher's block made (MOHAWK)."""

    kind: Literal["hidden"] = "hidden"
    learning_rates: dict[Group, float] = rates(new=3e-3, mixer=1e-3)
    loss: Literal["normalized", "l2"] = Field(
        "normalized", description="normalized: squared error over the target's squares; l2: mean distance of a token"
    )
    teacher_forced: bool = Field(True, description="whether blocks read the teacher's hidden states or the student's")

    def objective(self, bench: Workbench) -> nn.Module:
        return HiddenObjective(bench.student, bench.reference(), self)


class HiddenObjective(nn.Module):
    """Mean over blocks of the error of their outputs."""

    def __init__(self, student: PreTrainedModel, reference: Reference, settings: Hidden) -> None:
        super().__init__()
        self.student, self.settings = student, settings
        self.__dict__["reference"] = reference  # not a submodule: nothing of it trains

    reference: Reference

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """batch as `token_ids` -> scalar loss."""
        input_ids = token_ids(batch)
        seen = watch_blocks(self.reference, input_ids)
        blocks = find_layers(self.student, self.student.config)[0]
        outputs: list[torch.Tensor] = []
        if self.settings.teacher_forced:
            for block, call in zip(blocks, seen, strict=True):
                outputs.append(_first(block(call.hidden_states, **call.arguments)))
        else:
            handles = [b.register_forward_hook(lambda _, args, out: outputs.append(_first(out))) for b in blocks]
            try:
                last_hidden(self.student, input_ids)
            finally:
                for handle in handles:
                    handle.remove()
        errors = [self._error(mine, call.output) for mine, call in zip(outputs, seen, strict=True)]
        return torch.stack(errors).mean()

    def _error(self, mine: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mine, target = real_tokens(mine), real_tokens(target)
        if self.settings.loss == "normalized":
            return normalized_error(mine, target)
        return torch.linalg.vector_norm(mine.float() - target.float(), dim=-1).mean()


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
