"""What every stage shares: its settings, the bench it works on, and the rounds it is made of.

A stage is a file of this folder: a settings class, and `prepare`, which readies the student and says what is minimised
over which tensors. Most stages are one round of training; `stepwise` and `anneal` are several.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import nn
from transformers import PreTrainedModel

from linearize.distill.adapters import adapter_targets, attach_adapters, merge_adapters
from linearize.distill.data import TokenBlocks
from linearize.distill.parameters import GROUPS, Group, trainable_groups, untie
from linearize.distill.reference import Reference
from linearize.distill.schedules import Schedule


@dataclass
class Workbench:
    """What a stage works on.

    Attributes:
        student: trained in place.
        teacher: the loaded teacher; it shares every tensor with the student that no stage has trained yet.
        new: names of the student's tensors that the teacher does not have.
        data: the stage's training examples.
        steps: batches that the stage will draw from them, with `batch_size` and `seed`.
        state: path without suffix for files of the stage's own.
    """

    student: PreTrainedModel
    teacher: PreTrainedModel
    new: frozenset[str]
    data: TokenBlocks
    steps: int
    batch_size: int
    seed: int
    state: Path

    def reference(self) -> Reference:
        """The teacher: the student's own tensors as long as they still hold it, else the loaded one."""
        return Reference(self.student, self.teacher)


@dataclass
class Round:
    """One stretch of training.

    Attributes:
        objective: `objective(batch)` is the scalar to minimise.
        groups: optimizer groups, see `train`.
        share: of the stage's tokens.
    """

    objective: nn.Module
    groups: list[dict[str, Any]]
    share: float = 1.0


def rates(**by_group: float) -> Any:
    """A field of highest rates by group."""
    return Field(
        default_factory=lambda: dict(by_group),
        description="highest rate by group, which is what trains: new (tensors the teacher lacks), adapters (LoRA), "
        "mixer (all of the mixers), layer (whole blocks), all; a tensor takes its narrowest group's",
    )


class Stage(BaseModel):
    """Settings that all stages have."""

    model_config = ConfigDict(extra="forbid")

    examples: ClassVar[bool] = False
    """Whether the stage reads conversations, not running text: see `load_examples`."""
    example_shape: ClassVar[tuple[int, ...]] = ()
    """A batch is `[B, *example_shape, T]`."""
    beyond_teacher: ClassVar[bool] = False
    """Whether sequences may be longer than the teacher's positions."""

    kind: str = Field(description="which stage")
    name: str | None = Field(None, description="its name among the stages; none: its kind")
    tokens: int = Field(100_000, ge=0, description="tokens to train on; 0 skips the stage")
    batch_size: int | None = Field(None, ge=1, description="sequences per step; none: by the number of tokens")
    context: int | None = Field(None, ge=2, description="tokens per sequence; none: the recipe's")
    data: str | dict[str, float] | None = Field(None, description="data of this stage alone; none: the recipe's")
    learning_rates: dict[Group, float] = rates()
    schedule: Schedule = Field("cosine", description="of the rates: cosine, linear, constant, wsd or plateau")
    warmup: float = Field(0.05, ge=0, le=1, description="share of the steps during which the rates rise")
    final_rate: float = Field(0.05, ge=0, le=1, description="rates at the end, relative to the highest")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW, decoupled")
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")

    @field_validator("learning_rates")
    @classmethod
    def _positive(cls, rates: dict[Group, float]) -> dict[Group, float]:
        for group, rate in rates.items():
            if not rate > 0:
                raise ValueError(
                    f"the rate of {group!r} is {rate}; it must be positive; leave the group out to freeze it"
                )
        return {group: rates[group] for group in GROUPS if group in rates}

    @property
    def label(self) -> str:
        """The stage's name in files, messages and records."""
        return self.name or self.kind

    def check(self, student: PreTrainedModel) -> None:
        """Raise `ConversionError` if the stage's settings do not fit a student; before any work, on meta tensors."""

    def check_documents(self) -> None:
        """Raise `ConversionError` if the stage reads running text only, not documents apart from each other."""

    def prepare(self, bench: Workbench) -> Iterator[Round]:
        """Ready the student and yield what to train, round by round; each round is trained before the next is asked for.

        Deterministic: a resumed run prepares every stage again and finds the same tensors.
        """
        self.ready(bench)
        yield Round(self.objective(bench), self.groups(bench))

    def ready(self, bench: Workbench) -> None:
        """Give the student the tensors that this stage trains."""
        if set(self.learning_rates) & {"mixer", "layer", "all"}:
            merge_adapters(bench.student)

    def objective(self, bench: Workbench) -> nn.Module:
        """What the stage minimises."""
        raise TypeError(f"{type(self).__name__} must implement objective()")

    def groups(self, bench: Workbench, layers: set[int] | None = None) -> list[dict[str, Any]]:
        """Optimizer groups by `learning_rates`; tensors that are shared with the teacher are copied first.

        Args:
            layers: only tensors of these layers' mixers and blocks; None for all.
        """
        rates = dict(self.learning_rates)
        untie(bench.student, bench.teacher, bench.new, rates, layers)
        return trainable_groups(bench.student, bench.new, rates, self.weight_decay, layers)

    def load_examples(self, documents: list[str], tokenizer: Any, context: int, count: int, seed: int) -> TokenBlocks:
        """At most `count` examples for stages with `examples`.

        Args:
            documents: text to make examples from where `data` is None.
        """
        raise TypeError(f"{type(self).__name__} reads running text")


class AdapterStage(Stage):
    """Settings of stages that can train LoRA."""

    rank: int = Field(32, ge=1, description="rank of the adapters")
    alpha: int = Field(64, ge=1, description="scale of the adapters: alpha / rank")
    targets: list[str] = Field(
        default_factory=lambda: ["attention"],
        description="what gets adapters: attention (the mixers' projections), mlp, or projections by name",
    )

    def check(self, student: PreTrainedModel) -> None:
        if "adapters" in self.learning_rates:
            adapter_targets(student, self.targets)

    def ready(self, bench: Workbench) -> None:
        super().ready(bench)
        if "adapters" in self.learning_rates:
            attach_adapters(bench.student, self.rank, self.alpha, tuple(self.targets))
