"""Mixing-matrix orientation: the student's mixing matrices towards the teacher's attention weights.

The first of MOHAWK's stages (arXiv 2408.10189): `‖M_student - A_teacher‖_F` of every head, the teacher's hidden states
going on from layer to layer. Matrices are T × T per head, so sequences are short.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from linearize.convert.calibration import routed
from linearize.convert.errors import ConversionError
from linearize.convert.mixers import Mixer
from linearize.convert.surgery import student_mixers
from linearize.distill.capture import watch_attention
from linearize.distill.mixing import check_linear, mixing_matrix, teacher_matrix
from linearize.distill.parameters import Group
from linearize.distill.reference import Reference
from linearize.distill.stages.base import Stage, Workbench, rates


class Matrix(Stage):
    """The mixers' mixing matrices learn the teacher's attention weights (MOHAWK)."""

    kind: Literal["matrix"] = "matrix"
    context: int | None = Field(64, ge=2, description="tokens per sequence; none: the recipe's")
    learning_rates: dict[Group, float] = rates(new=1e-2, mixer=1e-3)

    def check_documents(self) -> None:
        raise ConversionError(f"stage {self.label} reads running text; with it, documents must be 'joined'")

    def objective(self, bench: Workbench) -> nn.Module:
        for mixer in student_mixers(bench.student):
            check_linear(mixer)
        return MatrixObjective(bench.student, bench.reference())


class MatrixObjective(nn.Module):
    """Mean over layers, sequences and heads of `‖M - A‖_F`."""

    def __init__(self, student: nn.Module, reference: Reference) -> None:
        super().__init__()
        self.student = student
        self.__dict__["reference"] = reference  # not a submodule: nothing of it trains

    reference: Reference

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids `[B, T]` -> scalar loss."""
        seen = watch_attention(self.reference, input_ids)
        mixers = student_mixers(self.student)

        def error(mixer: Mixer, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            rope = seen[mixer.layer_idx].rope
            theirs, mine = (matrix(mixer, hidden_states, rope) for matrix in (teacher_matrix, mixing_matrix))
            return torch.linalg.matrix_norm(mine - theirs).mean(), None

        with routed(mixers, error):  # through the mixers' own calls, which bring shards together
            losses = [mixer(seen[mixer.layer_idx].hidden_states)[0] for mixer in mixers]
        return torch.stack(losses).mean()
