"""The whole evaluation: saved and read again it is the same, and comparisons say when conditions differ."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from linearize.convert import build_student
from linearize.convert.errors import ConversionError
from linearize.distill.evaluate.suite import (
    QUESTIONS,
    Evaluation,
    Settings,
    Subject,
    evaluate,
    load_evaluation,
)
from linearize.distill.evaluate.text import comparison_json, comparison_text, distinct_names
from tests.distill.test_evaluate import byte_tokenizer, ids_of, moved_student, teacher_model

SMALL = Settings(
    tokens=512, context=64, positions=100, needle_lengths=(256,), needle_depths=(0.5,), needle_samples=1,
    speed_contexts=(16,), mqar_pairs=(3,), mqar_examples=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return Subject(moved_student(), teacher_model(), tokenizer, ids_of(1, 1000)[0], "mine", "theirs", "random tokens")


@pytest.fixture(scope="module")
def whole(subject: Subject) -> Evaluation:
    return evaluate(subject, QUESTIONS, SMALL, date="2020-01-02")


def test_all_questions_are_answered_and_kept(whole: Evaluation, tmp_path: Path) -> None:
    assert all(getattr(whole, name) is not None for name in QUESTIONS) and whole.retrieval is whole.harness is None
    file = whole.save(tmp_path)
    again = load_evaluation(tmp_path)
    assert again == whole and load_evaluation(file) == whole
    (tmp_path / "again").mkdir()
    assert again.save(tmp_path / "again").read_bytes() == file.read_bytes()
    assert again.to_text() == whole.to_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "evaluation.json"]
    data = json.loads(file.read_text())
    assert data["conditions"]["date"] == "2020-01-02" and data["conditions"]["settings"]["tokens"] == 512
    assert data["conditions"]["mixers"] == ["rodimus"] * 2
    names = [task["task"] for task in data["tasks"]]
    assert names == ["language", "mqar, 3 pairs", "needle, easy", "needle, standard"]
    language = data["tasks"][0]
    share = (language["student"] - language["chance"]) / (language["teacher"] - language["chance"])
    assert language["recovery"] is None or language["recovery"] == pytest.approx(share)


def test_only_what_is_asked_is_measured(subject: Subject) -> None:
    result = evaluate(subject, ("language",), SMALL)
    assert result.language is not None and set(result.seconds) == {"language"} and result.conditions.date is None
    assert all(getattr(result, name) is None for name in QUESTIONS if name != "language")
    again = evaluate(subject, ("language",), SMALL)
    assert again.language == result.language
    with pytest.raises(ConversionError, match="--retrieval"):
        evaluate(subject, ("retrieval",), SMALL)


def test_a_student_without_a_recurrence_says_so(subject: Subject) -> None:
    swa = dataclasses.replace(subject, student=build_student(teacher_model(), "swa", window=8))
    result = evaluate(swa, ("branches", "state"), SMALL)
    assert result.branches is result.state is None
    assert (
        "no layer has both a window and a recurrence" in result.to_text()
        and "no layer has a matrix" in result.to_text()
    )


def test_damaged_or_missing_files_are_refused(whole: Evaluation, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="linearize eval"):
        load_evaluation(tmp_path)
    file = whole.save(tmp_path)
    for text in ("{", json.dumps({**whole.to_json(), "colour": "red"}), "[]"):
        file.write_text(text)
        with pytest.raises(ConversionError, match="no evaluation"):
            load_evaluation(tmp_path)


def test_students_side_by_side(whole: Evaluation) -> None:
    other = dataclasses.replace(whole, conditions=dataclasses.replace(whole.conditions, student="other"))
    text = comparison_text(["mine", "other"], [whole, other])
    assert "warning" not in text and f"{whole.language.perplexity:.4g}" in text  # type: ignore[union-attr]
    assert text.splitlines()[0].split() == ["mine", "other", "teacher"] and "language" in text
    changed = dataclasses.replace(whole.conditions, student="short", settings=dataclasses.replace(SMALL, tokens=256))
    different = dataclasses.replace(whole, conditions=changed, tasks=[])
    text = comparison_text(["mine", "short"], [whole, different])
    assert "warning: short and mine were measured with different settings" in text
    data = comparison_json(["mine", "short"], [whole, different])
    assert set(data["students"]) == {"mine", "short"} and len(data["warnings"]) == 1  # type: ignore[arg-type, call-overload]
    assert distinct_names(["a", "b", "a"]) == ["a", "b", "a (2)"]
