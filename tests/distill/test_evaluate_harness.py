"""Standard tasks from local files: scores equal plain arithmetic, whatever the batch, from a directory or an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from linearize.convert import export
from linearize.convert.errors import ConversionError
from linearize.distill.evaluate.harness import LOCAL_TASKS, evaluate_model, run_harness
from tests.distill.test_evaluate import byte_tokenizer, moved_student, teacher_model

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

CHOICE = {"query": "What is on the mat?", "choices": ["the cat", "a hat", "Question", "33"], "gold": 0}
LINES: dict[str, list[dict[str, Any]]] = {
    "lambada": [{"context": f"the cat sat on the {'the ' * i}", "continuation": "mat"} for i in range(3)],
    "winogrande": [
        {"context_options": ["the cat and the hat: the cat", "the cat and the hat: the hat"], "continuation": "sat.", "gold": 0},
        {"context_options": ["he", "she"], "continuation": "looked at it all.", "gold": 1},
    ],
    **{
        name: [{**CHOICE, "gold": i % 4, "query": CHOICE["query"] + " and" * i} for i in range(5)]
        for name in ("arc_easy", "arc_challenge", "piqa", "openbookqa", "hellaswag", "mmlu")
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, its exported student, and a file per task."""
    folder = tmp_path_factory.mktemp("harness")
    teacher_model().save_pretrained(folder / "teacher")
    byte_tokenizer(folder / "teacher")
    export(moved_student(), folder / "teacher", folder / "student")
    for name, lines in LINES.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder / "teacher")


def answers(result: dict[str, Any]) -> dict[str, list[float]]:
    """Every log-likelihood of every question."""
    return {
        task: [float(response[0][0]) for sample in samples for response in sample["resps"]]
        for task, samples in result["samples"].items()
    }


def test_every_task_has_a_definition_and_a_score(folder: Path, tokenizer: Any) -> None:
    assert set(LOCAL_TASKS) == set(LINES)
    score = run_harness({"student": moved_student(), "teacher": teacher_model()}, tokenizer, list(LOCAL_TASKS), folder)
    chance = {task.task: task.chance for task in score.tasks}
    assert chance == {name: {"lambada": 0.0, "winogrande": 0.5}.get(name, 0.25) for name in LINES}
    assert {task.task: task.samples for task in score.tasks} == {name: len(lines) for name, lines in LINES.items()}
    assert {t.metric for t in score.tasks if t.task == "piqa"} == {"acc", "acc_norm"}
    assert "perplexity" in score.raw["student"]["lambada"]
    limited = evaluate_model(moved_student(), tokenizer, ["piqa"], folder, limit=2)
    assert len(limited["samples"]["piqa"]) == 2


@torch.no_grad()
def test_scores_equal_plain_arithmetic(folder: Path, tokenizer: Any) -> None:
    student = moved_student()
    result = evaluate_model(student, tokenizer, ["arc_easy", "winogrande", "lambada"], folder)

    def log_likelihood(context: str, answer: str) -> float:
        before, whole = (tokenizer(text).input_ids for text in (context, context + answer))
        log_p = student(torch.tensor([whole]), use_cache=False).logits[0].log_softmax(-1)
        return sum(float(log_p[i - 1, whole[i]]) for i in range(len(before), len(whole)))

    arc = [
        [log_likelihood(f"Question: {line['query']}\nAnswer:", " " + c) for c in line["choices"]]
        for line in LINES["arc_easy"]
    ]
    found = answers(result)
    assert found["arc_easy"] == pytest.approx([x for row in arc for x in row], abs=1e-3)
    right = [
        max(range(4), key=row.__getitem__) == line["gold"] for row, line in zip(arc, LINES["arc_easy"], strict=True)
    ]
    assert result["results"]["arc_easy"]["acc,none"] == pytest.approx(sum(right) / 5)
    wino = [
        log_likelihood(c, " " + line["continuation"]) for line in LINES["winogrande"] for c in line["context_options"]
    ]
    assert found["winogrande"] == pytest.approx(wino, abs=1e-3)
    last = [log_likelihood(line["context"].rstrip(), " mat") for line in LINES["lambada"]]
    assert found["lambada"] == pytest.approx(last, abs=1e-3)


def test_the_batch_size_changes_nothing(folder: Path, tokenizer: Any) -> None:
    tasks = ["openbookqa", "winogrande", "lambada"]
    alone, together = (evaluate_model(moved_student(), tokenizer, tasks, folder, batch_size=size) for size in (1, 7))
    for task, values in answers(alone).items():
        assert answers(together)[task] == pytest.approx(values, abs=1e-4)
        assert {k: v for k, v in alone["results"][task].items() if "acc" in k} == {
            k: v for k, v in together["results"][task].items() if "acc" in k
        }


def test_a_directory_scores_as_the_object_does(folder: Path, tokenizer: Any) -> None:
    tasks = ["piqa", "mmlu"]
    mine = evaluate_model(moved_student(), tokenizer, tasks, folder)
    loaded = evaluate_model(str(folder / "student"), tokenizer, tasks, folder)
    assert answers(loaded) == {task: pytest.approx(values, abs=1e-5) for task, values in answers(mine).items()}
    teachers = evaluate_model(teacher_model(), tokenizer, tasks, folder)
    assert answers(teachers)["piqa"] != pytest.approx(answers(mine)["piqa"], abs=1e-3)


def test_files_that_are_missing_or_broken_get_one_line(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    models = {"student": moved_student(), "teacher": teacher_model()}
    with pytest.raises(ConversionError, match=r"piqa\.jsonl: no such file"):
        run_harness(models, tokenizer, ["piqa"], tmp_path)
    with pytest.raises(ConversionError, match="no local definition of the task 'gsm8k'"):
        run_harness(models, tokenizer, ["gsm8k"], folder)
    (tmp_path / "piqa.jsonl").write_text("{\n")
    with pytest.raises(ConversionError, match="line 1"):
        run_harness(models, tokenizer, ["piqa"], tmp_path)
