"""`linearize eval` and `linearize compare` from the command line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from linearize.convert import export
from tests.distill.test_evaluate import byte_tokenizer, moved_student, teacher_model

TEXT = "the cat sat on the mat and looked at the hat of the other cat, number 123\n" * 300
SMALL = [
    "--tokens", "512", "--context", "64", "--positions", "128", "--lengths", "256", "--samples", "1",
    "--speed-contexts", "16,32",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, a student of it whose record names it, and a text."""
    folder = tmp_path_factory.mktemp("eval")
    teacher_model().save_pretrained(folder / "teacher")
    byte_tokenizer(folder / "teacher")
    (folder / "text.txt").write_text(TEXT)
    record = {"recipe": {"teacher": str(folder / "teacher"), "revision": None, "data": str(folder / "text.txt")}}
    export(moved_student(), folder / "teacher", folder / "student", record)
    return folder


def run(capsys: Any, monkeypatch: Any, *arguments: str) -> tuple[int, str, str]:
    """In this process, which is quicker."""
    from linearize.recipes.cli import main

    monkeypatch.setattr(sys, "argv", ["linearize", *arguments])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def test_eval_measures_saves_and_prints(folder: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    student = tmp_path / "student"
    shutil.copytree(folder / "student", student)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"context": "the cat sat on", "continuation": " the mat"}))
    code, out, err = run(capsys, monkeypatch, "eval", str(student), *SMALL, "--retrieval", str(pairs), "--json")
    assert code == 0, err
    data = json.loads(out)  # standard output holds the object and nothing else
    assert json.loads((student / "evaluation.json").read_text()) == data
    asked = ("language", "positions", "branches", "state", "mqar", "needle", "retrieval", "speed")
    assert all(data[name] is not None for name in asked) and data["harness"] is None
    assert data["conditions"]["data"].startswith("the last tenth of") and data["conditions"]["teacher"] == "teacher"
    assert data["language"]["tokens"] == 8 * 63 and data["positions"]["student"]["edges"][-1] == 128

    before = (student / "evaluation.json").read_bytes()
    other = [
        "--tasks",
        "language",
        "--no-save",
        "--data",
        str(folder / "text.txt"),
        "--teacher",
        str(folder / "teacher"),
    ]
    code, out, err = run(capsys, monkeypatch, "eval", str(student), *SMALL, *other)
    assert code == 0 and "perplexity per token" in out and "needle" not in out, err
    assert (student / "evaluation.json").read_bytes() == before

    second = tmp_path / "second"
    shutil.copytree(student, second)
    code, out, _ = run(capsys, monkeypatch, "compare", str(student), str(second))
    assert code == 0 and "student (2)" in out and "recovery" in out and "warning" not in out
    code, out, _ = run(capsys, monkeypatch, "compare", str(student), str(second / "evaluation.json"), "--json")
    assert code == 0 and set(json.loads(out)["students"]) == {"student", "student (2)"}


def test_another_text_is_read_whole(folder: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT[:2000])
    arguments = ["eval", str(folder / "student"), *SMALL, "--tasks", "language", "--no-save", "--json"]
    code, out, _ = run(capsys, monkeypatch, *arguments, "--data", str(other), "--date", "2020-01-01")
    conditions = json.loads(out)["conditions"]
    assert code == 0 and conditions["data"] == str(other) and conditions["date"] == "2020-01-01"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "{teacher}"], "not an exported student"),
        (["eval", "{student}", "--teacher", "./none"], "--teacher"),
        (["eval", "{student}", "--data", "./none.txt"], "none.txt"),
        (["eval", "{student}", "--lengths", "0"], "--lengths"),
        (["eval", "{student}", "--tasks", "retrieval", *SMALL], "--retrieval"),
        (["eval", "{student}", "--tasks", "language,piqa", "--tasks-data", "./none", *SMALL], "piqa.jsonl"),
        (["compare", "{student}"], "linearize eval"),
    ],
)
def test_bad_input_gets_one_line(
    arguments: list[str], words: str, folder: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    if "piqa" in arguments[-1] or ("./none" in arguments and "--tasks-data" in arguments):
        pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    monkeypatch.chdir(tmp_path)
    names = {"student": str(folder / "student"), "teacher": str(folder / "teacher")}
    code, out, err = run(capsys, monkeypatch, *(a.format(**names) for a in arguments))
    problem = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 2 and len(problem) == 1 and words in problem[0] and not out, err
    assert not (folder / "student" / "evaluation.json").exists()
