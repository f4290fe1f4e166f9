"""A recipe's engine and data settings, end to end; and on two processes, as `accelerate launch` starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from linearize.convert.verify import verify
from linearize.distill.loss_log import read_rows
from linearize.recipes import pipeline
from linearize.recipes.schema import Recipe
from tests.families import random_teacher, tiny_tokenizer
from tests.processes import PLACEMENTS, on_processes

CONFIGURATIONS = Path(__file__).resolve().parents[2] / "recipes" / "accelerate"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "teacher"
    random_teacher("llama", max_position_embeddings=64, num_hidden_layers=2, bos_token_id=1).save_pretrained(folder)
    tiny_tokenizer(folder)
    (folder.parent / "a.txt").write_text(
        "<|endoftext|>".join(f"the cat sat on the mat {'and ' * (i % 9)}" for i in range(300))
    )
    rows = (json.dumps({"text": f"the hat looked at {'the other ' * (i % 7)}cat"}) for i in range(300))
    (folder.parent / "b.jsonl").write_text("\n".join(rows))
    return folder


def _recipe(teacher: Path, **changes: Any) -> Recipe:
    stages = [
        {"kind": "transfer", "tokens": 300, "batch_size": 2},
        {"kind": "lora", "tokens": 300, "batch_size": 2, "rank": 2},
    ]
    given = {
        "teacher": str(teacher), "data": str(teacher.parent / "a.txt"), "context": 40, "heldout_tokens": 200,
        "control": False, "calibration_tokens": 80, "options": {"window": 4}, "stages": stages,
    }  # fmt: skip
    return Recipe.model_validate({**given, **changes})


def _run(recipe: Recipe, out: Path) -> None:
    pipeline.verify_in_fresh_process = verify
    pipeline.run(recipe, out)


def _mixed(teacher: Path) -> dict[str, float]:
    return {str(teacher.parent / "a.txt"): 3, str(teacher.parent / "b.jsonl"): 1}


@pytest.mark.parametrize("changes", [{"documents": "packed"}, {"documents": "padded"}, {"streaming": True}], ids=str)
def test_a_mixture_in_every_form_runs_to_its_end(
    changes: dict[str, Any], teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "verify_in_fresh_process", verify)
    recipe = _recipe(teacher, data=_mixed(teacher), **changes)
    summary = pipeline.run(recipe, tmp_path / "out")
    assert summary.gate["passed"] and summary.data.startswith("75% ") and set(summary.tokens) == {"transfer", "lora"}
    record = json.loads((tmp_path / "out" / "linearize.json").read_text())
    rows = read_rows(tmp_path / "out" / "losses.csv")
    for stage, losses in record["losses"].items():
        assert [float(row[2]) for row in rows if row[0] == stage] == losses
    assert Recipe.model_validate(record["recipe"]) == recipe


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_two_processes_write_one_student_and_it_is_that_of_one(placement: str, teacher: Path, tmp_path: Path) -> None:
    recipe = _recipe(teacher)
    on_processes(1, "ddp", _run, recipe, tmp_path / "one")
    on_processes(2, placement, _run, recipe, tmp_path / "two")
    assert not (tmp_path / "two.partial").exists()
    one, two = (json.loads((tmp_path / run / "linearize.json").read_text()) for run in ("one", "two"))
    for stage, losses in one["losses"].items():
        assert two["losses"][stage] == pytest.approx(losses, rel=1e-4)
    assert two["summary"]["kl"] == pytest.approx(one["summary"]["kl"], rel=1e-3)
    for moment in ("surgery", "student"):
        assert two["layer_errors"][moment] == pytest.approx(one["layer_errors"][moment], rel=1e-3)
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "two" / "model.safetensors").items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=1e-4, msg=name)


# Each process writes a file of its own: lines of two processes on one pipe may interleave.
SAY = (
    "import json, os, pathlib, sys; from linearize.distill import processes; processes.start(); "
    "said = json.dumps([processes.rank(), processes.count(), dict(os.environ)]); "
    "pathlib.Path(sys.argv[1], f'{processes.rank()}.json').write_text(said); processes.stop()"
)


@pytest.mark.parametrize("name", ["fsdp2", "deepspeed_zero2"])
def test_a_shipped_configuration_starts_two_processes_that_know_what_to_do(name: str, tmp_path: Path) -> None:
    if name == "deepspeed_zero2":
        pytest.importorskip("deepspeed", reason="deepspeed is not installed; its configuration cannot be launched")
    script = tmp_path / "say.py"
    script.write_text(SAY)
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGURATIONS / f"{name}.yaml"),
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--main_process_port", "0", str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [rank for rank, _, _ in said] == [0, 1] and all(count == 2 for _, count, _ in said)
    for _, _, found in said:
        for key, value in PLACEMENTS.get(name, {}).items():
            assert found[key] == value


def test_the_shipped_configurations_are_what_accelerate_reads() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    files = sorted(CONFIGURATIONS.glob("*.yaml"))
    assert [file.stem for file in files] == ["ddp", "deepspeed_zero2", "fsdp2"]
    for file in files:
        read = load_config_from_file(str(file))
        assert read.distributed_type == yaml.safe_load(file.read_text())["distributed_type"]
        assert read.mixed_precision == "no" and read.num_processes == 2
