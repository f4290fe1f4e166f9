"""The standard tasks through lm-evaluation-harness (extra `eval`), from the Hub or from local JSONL.

Online, a task's name is the harness's own. Offline, the definitions in `tasks/` give the same prompts to local files:
`FOLDER/<task>.jsonl`, whose fields each definition names in its first line.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel

from linearize.convert.errors import ConversionError
from linearize.distill.device import choose_device
from linearize.distill.evaluate.recovery import TaskScore

DEFINITIONS = Path(__file__).parent / "tasks"
LOCAL_TASKS = tuple(sorted(file.stem for file in DEFINITIONS.glob("*.yaml")))
"""Tasks that can run on local files."""

_FILE_NAMES = {"lambada": ("lambada_openai",), "openbookqa": ("openbook_qa",)}
"""Other names under which a task's file is found."""

Metrics = dict[str, dict[str, float]]
"""Task -> metric -> value, as the harness gives them."""


@dataclass(frozen=True)
class HarnessScore:
    """What the harness says of student and teacher.

    Attributes:
        tasks: every metric of which more is better, with its chance level.
        raw: "student" and "teacher" -> all metrics.
        source: the folder's name, or "hub".
        limit: questions per task; None for all.
    """

    tasks: list[TaskScore]
    raw: dict[str, Metrics]
    source: str
    limit: int | None
    batch_size: int
    version: str


def run_harness(
    models: dict[str, PreTrainedModel],
    tokenizer: Any,
    tasks: list[str],
    data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> HarnessScore:
    """Run tasks on "student" and "teacher".

    Args:
        data: folder of local JSONL files; None reads the Hub.
        limit: questions per task, the first ones.

    Raises:
        ConversionError: the harness is not installed, a task is unknown, or its data cannot be read.
    """
    check_tasks(tasks, data)
    results = {
        who: evaluate_model(model, tokenizer, tasks, data, limit, batch_size, seed) for who, model in models.items()
    }
    raw = {who: _metrics(result) for who, result in results.items()}
    scores = _task_scores(results["student"], raw["student"], raw["teacher"])
    source = "hub" if data is None else data.name
    return HarnessScore(scores, raw, source, limit, batch_size, version("lm-eval"))


def evaluate_model(
    model: PreTrainedModel | str,
    tokenizer: Any,
    tasks: list[str],
    data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> dict[str, Any]:
    """The harness's own result for one model, given as an object or as a directory."""
    check_tasks(tasks, data)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with _quiet():
        specs: list[Any] = list(tasks) if data is None else [local_task(name, data) for name in tasks]
        try:
            device = choose_device()  # of a directory; an object stays where it is
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=device)
            return simple_evaluate(
                wrapped, tasks=specs, limit=limit, bootstrap_iters=1000, random_seed=seed, numpy_random_seed=seed,
                torch_random_seed=seed, fewshot_random_seed=seed,
                task_manager=TaskManager(include_defaults=data is None),  # its own tasks take many seconds to list
            )  # fmt: skip
        except (OSError, KeyError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            advice = "" if data is not None else "; without a network give local files with --tasks-data"
            raise ConversionError(f"tasks {', '.join(tasks)}: {reason}{advice}") from error


def local_task(name: str, folder: Path) -> Any:
    """A harness task on `folder/<name>.jsonl`.

    Raises:
        ConversionError: there is no definition of that name, or no such file.
    """
    from datasets import Dataset, DatasetDict
    from lm_eval.api.task import ConfigurableTask

    file = _task_file(name, folder)
    definition = yaml.safe_load((DEFINITIONS / f"{name}.yaml").read_text(encoding="utf-8"))
    rows = _rows(file)

    def dataset(**_: Any) -> Any:
        return DatasetDict({"test": Dataset.from_list(rows)})

    return ConfigurableTask(config={**definition, "test_split": "test", "custom_dataset": dataset})


def _task_file(name: str, folder: Path) -> Path:
    if name not in LOCAL_TASKS:
        raise ConversionError(f"no local definition of the task {name!r}; there are {', '.join(LOCAL_TASKS)}")
    files = [folder / f"{stem}.jsonl" for stem in (name, *_FILE_NAMES.get(name, ()))]
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        raise ConversionError(f"{files[0]}: no such file; --tasks-data holds one JSONL file per task")
    return file


def _rows(file: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError:
                raise ConversionError(f"{file}, line {number}: not a JSON object") from None
    if not rows:
        raise ConversionError(f"{file} is empty")
    return rows


def _metrics(result: dict[str, Any]) -> Metrics:
    """Numbers by plain metric names: `acc,none` becomes `acc`, other filters keep their name."""
    return {
        task: {key.removesuffix(",none"): float(v) for key, v in values.items() if isinstance(v, (int, float))}
        for task, values in sorted(result["results"].items())
    }


def _task_scores(result: dict[str, Any], student: Metrics, teacher: Metrics) -> list[TaskScore]:
    chances = _chances(result)
    scores = []
    for task, better in sorted(result["higher_is_better"].items()):
        for metric, more in sorted(better.items()):
            if not more or metric not in student.get(task, {}):
                continue
            count, chance = chances[task]
            error, mine, theirs = f"{metric}_stderr", student[task], teacher[task]
            numbers = mine[metric], theirs[metric], chance
            scores.append(TaskScore(task, metric, *numbers, count, mine.get(error), theirs.get(error)))
    return scores


def _chances(result: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Task or group -> number of questions, and the mean of one over the number of choices (0 for free answers)."""
    found = {}
    for task, samples in result["samples"].items():
        choices = [len(sample["resps"]) for sample in samples]
        shares = [1 / count if count > 1 else 0.0 for count in choices]
        found[task] = (len(samples), sum(shares) / max(1, len(shares)))
    for group, members in result.get("group_subtasks", {}).items():
        inside = [found[m] for m in members if m in found]
        total = sum(count for count, _ in inside)
        if group not in found and total:
            found[group] = (total, sum(count * chance for count, chance in inside) / total)
    return {**{task: (0, 0.0) for task in result["results"]}, **found}


def check_tasks(tasks: list[str], data: Path | None) -> None:
    """Find out quickly what `run_harness` would find out late.

    Raises:
        ConversionError: the harness is not installed, or a local task has no definition or no file.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ConversionError(
            f"{', '.join(tasks)}: no question of this package; as standard tasks they need lm-evaluation-harness: "
            "pip install 'linearize[eval]'"
        ) from None
    if data is not None:
        for name in tasks:
            _task_file(name, data)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness prints and warns; standard output is the caller's, and progress is for terminals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    error = sys.stderr if sys.stderr.isatty() else io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
            yield
    finally:
        logging.disable(before)
