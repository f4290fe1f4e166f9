"""Everything at once: runs the questions that are asked and keeps answers and conditions in one typed result.

`Evaluation.to_json` holds every figure with the data behind it, so that tables and plots can be made again from the
file alone.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic import dataclasses as checked
from transformers import PreTrainedModel

from linearize.convert.errors import ConversionError
from linearize.distill.data import TokenBlocks
from linearize.distill.evaluate.associative import MqarScore, score_mqar
from linearize.distill.evaluate.branches import BranchUse, branch_use
from linearize.distill.evaluate.harness import HarnessScore, check_tasks, run_harness
from linearize.distill.evaluate.language import LanguageScore, score_language
from linearize.distill.evaluate.needle import NeedleScore, find_needles
from linearize.distill.evaluate.positions import PositionScore, score_positions
from linearize.distill.evaluate.recovery import TaskScore
from linearize.distill.evaluate.retrieval import RetrievalScore, read_examples, score_retrieval
from linearize.distill.evaluate.speed import SpeedScore, measure_speed
from linearize.distill.evaluate.state import StateUse, state_use
from linearize.distill.evaluate.text import evaluation_text

FILE = "evaluation.json"
"""Where `linearize eval` keeps its result, inside the student's folder."""

QUESTIONS = ("language", "positions", "branches", "state", "mqar", "needle", "speed")
"""What is asked when nothing is chosen. `retrieval` needs a file, other names are tasks of the harness."""

_PACKAGES = ("linearize", "torch", "triton", "transformers", "datasets", "lm-eval")


@dataclass(frozen=True)
class Settings:
    """How much is measured. Token counts are lowered to what the text holds.

    Attributes:
        tokens: held-out tokens of `language`; `branches` takes a quarter of them, `state` the first two sequences.
        context: tokens of one sequence.
        positions: length of the texts read for `positions`.
        position_texts: how many of them.
        mqar_pairs, mqar_examples: numbers of pairs, and sequences for each.
        needle_lengths, needle_depths, needle_samples: the grid.
        speed_contexts: lengths of context.
        limit: questions per standard task and per retrieval file; None for all.
        batch_size: sequences at a time in `language` and the standard tasks.
    """

    tokens: int = 16_384
    context: int = 1024
    positions: int = 4096
    position_texts: int = 2
    mqar_pairs: tuple[int, ...] = (4, 16, 32)
    mqar_examples: int = 32
    needle_lengths: tuple[int, ...] = (256, 512, 1024)
    needle_depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needle_samples: int = 4
    speed_contexts: tuple[int, ...] = (256, 1024, 4096)
    limit: int | None = None
    batch_size: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Subject:
    """What is measured, and on what.

    Attributes:
        stream: held-out token ids `[N]`.
        data: what that text is.
        retrieval: JSONL file for `retrieval`.
        tasks_data: folder of local files for the standard tasks; None reads the Hub.
    """

    student: PreTrainedModel
    teacher: PreTrainedModel
    tokenizer: Any
    stream: torch.Tensor
    name: str
    teacher_name: str
    data: str
    retrieval: Path | None = None
    tasks_data: Path | None = None


@dataclass(frozen=True)
class Conditions:
    """Under which the numbers hold. `date` is given by the caller or left out."""

    student: str
    teacher: str
    mixers: list[str]
    data: str
    settings: Settings
    device: str
    dtype: str
    threads: int
    versions: dict[str, str]
    date: str | None = None


@checked.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Evaluation:
    """Answers to the questions that were asked; the others are None.

    Attributes:
        tasks: every score for which guessing has a number, with recovery; the basis of comparisons.
        seconds: per question.
    """

    conditions: Conditions
    language: LanguageScore | None = None
    positions: PositionScore | None = None
    branches: BranchUse | None = None
    state: StateUse | None = None
    mqar: MqarScore | None = None
    needle: NeedleScore | None = None
    retrieval: RetrievalScore | None = None
    speed: SpeedScore | None = None
    harness: HarnessScore | None = None
    tasks: list[TaskScore] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, numbers and strings; each task with its `recovery`."""
        data = TypeAdapter(Evaluation).dump_python(self, mode="json")
        for entry, task in zip(data["tasks"], self.tasks, strict=True):
            entry["recovery"] = task.recovery
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Evaluation:
        """The reverse of `to_json`.

        Raises:
            pydantic.ValidationError: the data is not an evaluation.
        """
        tasks = [{k: v for k, v in task.items() if k != "recovery"} for task in data.get("tasks", [])]
        return TypeAdapter(Evaluation).validate_python({**data, "tasks": tasks})

    def to_text(self) -> str:
        """The page a person reads."""
        return evaluation_text(self)

    def save(self, folder: Path) -> Path:
        """Write `evaluation.json`; equal evaluations give equal bytes."""
        file = folder / FILE
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        partial.replace(file)
        return file


def load_evaluation(path: str | Path) -> Evaluation:
    """Read a student's folder, or the file itself.

    Raises:
        ConversionError: there is none, or it is damaged.
    """
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ConversionError(f"{path} has no {FILE}; run `linearize eval {path}` first")
    try:
        return Evaluation.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, ValidationError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConversionError(
            f"{file} is no evaluation of this version ({reason}); run `linearize eval` again"
        ) from None


def evaluate(
    subject: Subject, questions: tuple[str, ...] = QUESTIONS, settings: Settings | None = None, date: str | None = None
) -> Evaluation:
    """Ask the questions of a student and its teacher.

    Args:
        questions: of `QUESTIONS`, "retrieval", or names of standard tasks.

    Raises:
        ConversionError: a question cannot be asked; see the parts.
    """
    settings = settings or Settings()
    models = {"student": subject.student.eval(), "teacher": subject.teacher.eval()}
    answers: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    ask = _askers(subject, models, settings)
    standard = [name for name in questions if name not in ask]
    if "retrieval" in questions:
        if subject.retrieval is None:
            raise ConversionError("retrieval needs a file of questions; give one with --retrieval FILE.jsonl")
        read_examples(subject.retrieval, 1)
    if standard:
        check_tasks(standard, subject.tasks_data)
        ask["harness"] = lambda: run_harness(
            models, subject.tokenizer, standard, subject.tasks_data, settings.limit, settings.batch_size, settings.seed
        )
    for name in dict.fromkeys("harness" if name in standard else name for name in questions):
        began = time.perf_counter()
        answers[name] = ask[name]()
        seconds[name] = round(time.perf_counter() - began, 3)
    return Evaluation(
        conditions=_conditions(subject, settings, date), tasks=_all_tasks(answers, subject), seconds=seconds, **answers
    )


def _askers(subject: Subject, models: dict[str, PreTrainedModel], settings: Settings) -> dict[str, Callable[[], Any]]:
    student, teacher, stream = models["student"], models["teacher"], subject.stream

    def blocks(tokens: int) -> TokenBlocks:
        length = min(settings.context, stream.numel())
        return TokenBlocks(stream, length, "the held-out text").spread(tokens)

    def texts() -> torch.Tensor:
        length = min(settings.positions, stream.numel())
        return stream[: stream.numel() // length * length].view(-1, length)[: settings.position_texts]

    fitting = tuple(length for length in settings.needle_lengths if length <= stream.numel())

    return {
        "language": lambda: score_language(
            student, blocks(settings.tokens), settings.batch_size, "language", teacher, subject.tokenizer
        ),
        "positions": lambda: score_positions(student, teacher, texts()),
        "branches": lambda: branch_use(student, teacher, blocks(settings.tokens // 4).blocks),
        "state": lambda: state_use(student, blocks(settings.tokens).blocks[:2]),
        "mqar": lambda: score_mqar(
            student, teacher, settings.mqar_pairs, examples=settings.mqar_examples, seed=settings.seed
        ),
        "needle": lambda: find_needles(
            models, subject.tokenizer, stream, fitting or settings.needle_lengths, settings.needle_depths,
            samples=settings.needle_samples, seed=settings.seed,
        ),
        "retrieval": lambda: score_retrieval(
            student, teacher, subject.tokenizer, subject.retrieval or Path(), settings.limit
        ),
        "speed": lambda: measure_speed(models, settings.speed_contexts, seed=settings.seed),
    }  # fmt: skip


def _all_tasks(answers: dict[str, Any], subject: Subject) -> list[TaskScore]:
    """Scores with a chance level, in the order of the questions. Guessing a token costs log(vocabulary) nats."""
    tasks: list[TaskScore] = []
    for answer in answers.values():
        if isinstance(answer, LanguageScore):
            chance = -float(torch.tensor(subject.student.config.vocab_size, dtype=torch.float64).log())
            tasks.append(
                TaskScore("language", "minus nats per token", -answer.loss, -answer.teacher_loss, chance, answer.tokens)
            )
        elif isinstance(answer, (MqarScore, NeedleScore, RetrievalScore)):
            tasks += answer.tasks()
        elif isinstance(answer, HarnessScore):
            tasks += answer.tasks
    return tasks


def _conditions(subject: Subject, settings: Settings, date: str | None) -> Conditions:
    layers = subject.student.config.linearize["layers"] if hasattr(subject.student.config, "linearize") else []
    return Conditions(
        student=subject.name,
        teacher=subject.teacher_name,
        mixers=[layer["mixer"] for layer in layers],
        data=subject.data,
        settings=settings,
        device=str(subject.student.device),
        dtype=str(subject.student.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        date=date,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
