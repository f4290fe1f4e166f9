"""The benches over mixers: rows, tables, and that what was measured is not measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import linearize.recipes
from linearize.convert import ConversionError
from linearize.distill.evaluate.mqar import Task
from linearize.distill.evaluate.mqar_training import Training, mqar_table
from linearize.recipes import mqar_bench
from linearize.recipes.mixer_bench import MixerRow, bench_mixers, mixer_rows_table
from tests.families import random_teacher, tiny_tokenizer


def test_a_mixer_is_converted_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = tmp_path / "teacher"
    random_teacher("llama", num_hidden_layers=2).save_pretrained(teacher)
    tiny_tokenizer(teacher)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the hat " * 800)
    settings: dict[str, Any] = {"context": 32, "calibration_tokens": 64, "heldout_tokens": 128}
    arguments = (str(teacher), tmp_path / "out", ["gla"], 128, str(text))
    [row] = bench_mixers(*arguments, **settings)
    assert row.problem is None and row.mixer == "gla"
    assert row.attention_error and row.surgery and row.transfer and row.student and row.kl and row.decode
    assert row.state_bytes and row.kv_bytes and row.state_bytes["1024"] < row.kv_bytes["32768"]
    stored = json.loads((tmp_path / "out" / "mixers.json").read_text())
    assert MixerRow(**stored[0]) == row and "| gla |" in (tmp_path / "out" / "mixers.md").read_text()

    def refuse(*_: Any, **__: Any) -> None:
        raise ConversionError("was asked to convert")

    monkeypatch.setattr(linearize.recipes, "convert", refuse)
    assert bench_mixers(*arguments, **settings) == [row]
    [again] = bench_mixers(*arguments, **{**settings, "seed": 1})
    assert again.problem == "was asked to convert" and "- gla: was asked to convert" in mixer_rows_table([again])


def test_a_mixer_that_does_not_exist_is_named_before_any_runs(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="did you mean 'gla'"):
        bench_mixers("llama", tmp_path / "out", ["swa", "glaa"])
    with pytest.raises(ConversionError, match="did you mean 'gla'"):
        mqar_bench.bench_mqar(["swa", "glaa"], TASK, TRAINING, "cpu", tmp_path / "out.json")
    assert not list(tmp_path.iterdir())


TASK = Task(vocabulary=16, length=12, pairs=(2,), easier=())
TRAINING = Training(width=16, heads=1, steps=2, batch_size=4, learning_rates=(1e-3,))


def test_mqar_outcomes_are_kept_as_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mqar.json"
    [first] = mqar_bench.bench_mqar(["gla"], TASK, TRAINING, "cpu", file)
    assert first.steps == 2 and set(first.accuracy) == {2}
    trained: list[str] = []

    def train(to: str, *arguments: Any) -> Any:
        trained.append(to)
        return type(first).from_json({**first.to_json(), "mixer": to, "accuracy": {"2": 1.0}})

    monkeypatch.setattr(mqar_bench, "train_on_mqar", train)
    outcomes = mqar_bench.bench_mqar(["gla", "swa"], TASK, TRAINING, "cpu", file)
    assert outcomes[0] == first and trained == ["swa"]
    table = mqar_table(outcomes).splitlines()
    assert table[2].startswith("| swa | 100.0% |") and table[3].startswith("| gla |")
    mqar_bench.bench_mqar(["swa"], TASK, Training(), "cpu", file)
    assert trained == ["swa", "swa"]


def test_mqar_in_several_processes_is_the_same(tmp_path: Path) -> None:
    one, two = (mqar_bench.bench_mqar(["gla", "rat"], TASK, TRAINING, "cpu", tmp_path / f"{n}.json", n) for n in (1, 2))
    assert [(o.mixer, o.accuracy, o.loss) for o in two] == [(o.mixer, o.accuracy, pytest.approx(o.loss)) for o in one]
    assert mqar_table(two).count("| rat, chunk 4 |") == 1
