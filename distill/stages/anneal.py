"""Annealing: an option of the mixers moves in rounds from where the student equals its teacher to where it is fast.

RAT's chunk grows 1 → 2 → 4 → 8 → 16 (at 1 it is softmax attention); a window shrinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, ValidationError
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.errors import ConversionError
from linearize.convert.mixers import Mixer
from linearize.convert.surgery import student_mixers
from linearize.distill.parameters import Group
from linearize.distill.stages.base import Round, Workbench, rates
from linearize.distill.stages.logits import Distill
from linearize.distill.stages.transfer import Transfer, TransferObjective

_FREE = ("window",)  # options that no tensor's shape depends on, as long as they are not 0


class Anneal(Distill):
    """An option of the mixers changes round by round; each round learns the teacher's outputs or predictions."""

    kind: Literal["anneal"] = "anneal"
    learning_rates: dict[Group, float] = rates(new=3e-3, mixer=3e-4)
    option: str = Field("chunk", description="option of the mixers that changes")
    values: list[int] = Field(
        default_factory=lambda: [1, 2, 4, 8, 16], min_length=1, description="its values, one round each; the last stays"
    )
    learn: Literal["logits", "transfer"] = Field(
        "logits", description="logits: CE and KL of predictions; transfer: the outputs of the teacher's attention"
    )

    def check(self, student: PreTrainedModel) -> None:
        for value in self.values:
            set_option(student, self.option, value)

    def prepare(self, bench: Workbench) -> Iterator[Round]:
        self.ready(bench)
        for value in self.values:
            set_option(bench.student, self.option, value)
            yield Round(self.objective(bench), self.groups(bench), 1 / len(self.values))

    def objective(self, bench: Workbench) -> nn.Module:
        if self.learn == "transfer":
            return TransferObjective(bench.student, bench.reference(), Transfer())
        return super().objective(bench)


def set_option(student: PreTrainedModel, name: str, value: int) -> None:
    """Give every mixer that has it another value of an option; the student's plan says so from now on.

    Raises:
        ConversionError: no mixer can change it, or the value is out of range.
    """
    try:
        changed = [_set(mixer, student, name, value) for mixer in student_mixers(student)]
    except ValidationError as error:
        raise ConversionError(f"anneal: {name} = {value}: {error.errors()[0]['msg']}") from None
    if not any(changed):
        raise ConversionError(f"anneal: no mixer of this student can change its option {name!r} while it trains")


def _set(mixer: Mixer, student: PreTrainedModel, name: str, value: int) -> bool:
    setter = getattr(mixer, f"set_{name}", None)
    if setter is not None:
        setter(value)
        return True
    if name not in _FREE or not getattr(mixer.options, name, 0):
        return False
    if not value:
        raise ConversionError(f"anneal: {name} cannot shrink to 0; its smallest value is 1")
    mixer.options = type(mixer.options)(**{**mixer.options.model_dump(), name: value})
    layer = student.config.linearize["layers"][mixer.layer_idx]
    layer["options"] = {**layer["options"], name: value}
    return True
