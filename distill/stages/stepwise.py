"""Stepwise replacement: layers change over in rounds, and each round learns the teacher's predictions.

Layers whose turn has not come run the teacher's attention. (The Mamba in the Llama, arXiv 2408.15237.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from linearize.convert.calibration import teacher_route
from linearize.convert.mixers import Mixer
from linearize.convert.surgery import student_mixers
from linearize.distill.parameters import Group
from linearize.distill.stages.base import Round, Workbench, rates
from linearize.distill.stages.logits import Distill


class Stepwise(Distill):
    """More layers are replaced in every round; all that are replaced train."""

    kind: Literal["stepwise"] = "stepwise"
    learning_rates: dict[Group, float] = rates(new=3e-3, layer=1e-4)
    rounds: int = Field(4, ge=1, description="in how many rounds the layers are replaced; tokens are shared equally")
    order: Literal["last", "first", "spread"] = Field(
        "last", description="which layers come first: the last, the first, or every few over the whole depth"
    )

    def prepare(self, bench: Workbench) -> Iterator[Round]:
        self.ready(bench)
        mixers = student_mixers(bench.student)
        rounds = min(self.rounds, max(1, len(mixers)))
        order = self._order(mixers, rounds)
        for number in range(1, rounds + 1):
            replaced = order[: math.ceil(len(order) * number / rounds)]
            for mixer in mixers:
                mixer.__dict__["route"] = None if mixer in replaced else teacher_route
            groups = self.groups(bench, {mixer.layer_idx for mixer in replaced})
            yield Round(self.objective(bench), groups, 1 / rounds)

    def _order(self, mixers: list[Mixer], rounds: int) -> list[Mixer]:
        if self.order == "spread":
            return [mixer for start in range(rounds) for mixer in mixers[start::rounds]]
        return mixers[::-1] if self.order == "last" else mixers
