"""`convert` from the command line: results, bad input, being killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import random_teacher, tiny_tokenizer

TEXT = "the cat sat on the mat and looked at the hat of the other cat\n" * 400
SMALL = ["--context", "32", "--option", "rank=4", "--window", "8"]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "teacher"
    random_teacher("llama", max_position_embeddings=64).save_pretrained(folder)
    tiny_tokenizer(folder)
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


def start(*arguments: str, cwd: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "linearize.recipes.cli", *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def convert_arguments(teacher: Path, *more: str) -> list[str]:
    return ["convert", str(teacher), "--data", str(teacher.parent / "text.txt"), *SMALL, "--out", "student", *more]


def test_a_conversion_tells_everything_it_promises(teacher: Path, tmp_path: Path) -> None:
    code, out, err = run(*convert_arguments(teacher, "--tokens", "10k", "--json", "--keep-softmax", "1"), cwd=tmp_path)
    assert code == 0, err
    summary = json.loads(out)  # standard output holds the object and nothing else
    assert {
        "teacher",
        "to",
        "out",
        "perplexity",
        "kl",
        "top1_agreement",
        "state_bytes",
        "kv_bytes",
        "gate",
        "seconds",
    } <= set(summary)
    assert set(summary["perplexity"]) == {"teacher", "surgery", "transfer", "student"}
    assert summary["gate"]["passed"] and len(summary["gate"]["checks"]) >= 15
    assert summary["kv_bytes"]["32768"] == 4 * 2 * 32768 * 2 * 16 * 4
    assert summary["plan"][1]["mixer"] == "keep" and summary["plan"][0]["mixer"] == "rodimus"
    assert summary["state_bytes"]["32768"] - summary["state_bytes"]["1024"] == (32768 - 1024) * 2 * 2 * 16 * 4
    assert "transfer" in err and "lora" in err and "tokens/s" in err
    student = tmp_path / "student"
    assert not (tmp_path / "student.partial").exists()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (student / file).read_bytes() == (teacher / file).read_bytes()
    assert "linearize" in (student / "README.md").read_text()
    errors = json.loads((student / "linearize.json").read_text())["layer_errors"]
    assert set(errors) == {"surgery", "student"} and errors["student"][1] is None and len(errors["student"]) == 4
    page = (student / "report.html").read_bytes()
    assert b'id="figure-layer-errors"' in page and run("report", "student", cwd=tmp_path)[0] == 0
    assert (student / "report.html").read_bytes() == page
    kept = {
        n: t for n, t in load_file(teacher / "model.safetensors").items() if ".1." in n or "mlp" in n or "embed" in n
    }
    mine = load_file(student / "model.safetensors")
    assert kept and all(torch.equal(mine[n], t) for n, t in kept.items())

    code, out, _ = run("verify", "student", "--json", cwd=tmp_path)
    assert code == 0 and json.loads(out)["passed"]
    code, out, _ = run("generate", "student", "the cat", "--max-new-tokens", "4", "--json", cwd=tmp_path)
    assert code == 0 and json.loads(out)["continuation"]
    _remote_code_loads(student)

    tensors = load_file(student / "model.safetensors")
    save_file(
        {n: t + 1e-2 * (n.endswith("layers.0.mlp.down_proj.weight")) for n, t in tensors.items()},
        student / "model.safetensors",
    )
    code, out, _ = run("verify", "student", cwd=tmp_path)
    assert code == 1 and "FAILED" in out and "reload = memory" in out


def _remote_code_loads(student: Path) -> None:
    """Without `import linearize.convert`, by trust_remote_code, as a stranger would."""
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM\n"
        f"m = AutoModelForCausalLM.from_pretrained({str(student)!r}, trust_remote_code=True)\n"
        "print(type(m).__name__, m(torch.tensor([[2, 3, 4]])).logits.shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert "LinearizedLlamaForCausalLM" in done.stdout, done.stderr


def test_a_broken_mixer_fails_the_gate(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from linearize.convert import build_student, export, verify
    from linearize.convert.mixers.rodimus import Rodimus

    ids = torch.randint(2, 64, (4, 64), generator=torch.Generator().manual_seed(0))
    student = build_student(str(teacher), "rodimus", window=8, calibration=ids)
    export(student, teacher, tmp_path / "student")
    assert verify(tmp_path / "student").passed
    right = Rodimus.mix

    def forgets(self: Any, x: Any, rope: Any, mask: Any, state: Any, cu: Any = None) -> Any:
        heads, new = right(self, x, rope, mask, state, cu)
        return heads, {**new, "memory": new["memory"] * 0.9}

    monkeypatch.setattr(Rodimus, "mix", forgets)
    failed = {c.name for c in verify(tmp_path / "student").checks if not c.passed}
    assert {"float32: token by token = parallel", "float32: cached = uncached, in three pieces"} <= failed


def test_dry_run_writes_nothing_and_other_commands_answer(teacher: Path, tmp_path: Path) -> None:
    code, out, err = run(*convert_arguments(teacher, "--dry-run"), cwd=tmp_path)
    assert code == 0 and "rodimus" in out and not list(tmp_path.iterdir()), err
    code, out, _ = run("inspect", str(teacher), "--to", "rodimus", "--json", cwd=tmp_path)
    report = json.loads(out)
    fates = {fate for _, fate in report["tensors"].values()}
    assert code == 0 and fates == {"copied", "created and trained", "adapted by LoRA"}
    code, out, _ = run("list", "--json", cwd=tmp_path)
    assert code == 0 and {"rodimus", "swa", "softmax"} <= set(json.loads(out))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("to: swa\nstages: [{kind: lora, tokens: 1000}]\nlayrs: 3\n")
    code, _, err = run("convert", str(teacher), "--recipe", str(recipe), cwd=tmp_path)
    assert code == 2 and "layrs" in err and len(err.strip().splitlines()) == 1


def test_inspect_says_what_a_form_cannot_hold(teacher: Path) -> None:
    from linearize.recipes.inspection import inspect_teacher

    text = str(teacher.parent / "text.txt")
    lines = inspect_teacher(str(teacher), "ska:0,swa:1-3", errors=True, data=text).to_text().splitlines()
    layers = [line for line in lines if "attention output off by" in line]
    assert ["its form cannot hold" in line for line in layers] == [True, False, False, False]


# ---------------------------------------------------------------------- bad input


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def _truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _poisoned(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _encoder(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


BAD_TEACHERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no model": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no decoder": (_encoder, "encoder-decoder"),
    "pickle": (_pickled, "pickle"),
    "truncated": (_truncated, "truncated"),
    "NaN": (_poisoned, "model.norm.weight"),
    "no tokenizer": (_no_tokenizer, "tokenizer"),
}


def _check_refused(arguments: list[str], words: str, folder: Path, capsys: Any, monkeypatch: Any) -> None:
    """In this process, which is quicker; `test_bad_input_from_a_shell` is the same from outside."""
    from linearize.recipes.cli import main

    before = set(folder.rglob("*"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["linearize", "convert", *arguments])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capsys.readouterr()
    code = stopped.value.code
    problem = [line for line in err.strip().splitlines() if line.startswith("error:")]
    assert code == 2 and len(problem) == 1 and words in problem[0], err
    assert "Traceback" not in err and not out
    assert set(folder.rglob("*")) == before, "something was left behind"


@pytest.mark.parametrize("name", BAD_TEACHERS)
def test_bad_teachers_get_one_clear_line(
    name: str, teacher: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    spoil, words = BAD_TEACHERS[name]
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    spoil(copy)
    text = str(teacher.parent / "text.txt")
    arguments = [str(copy), "--data", text, *SMALL, "--out", "s"]
    _check_refused(arguments, words, tmp_path, capsys, monkeypatch)


def test_bad_input_from_a_shell(teacher: Path, tmp_path: Path) -> None:
    code, out, err = run(*convert_arguments(teacher, "--to", "rodimuss"), cwd=tmp_path)
    assert code == 2 and not out and not list(tmp_path.iterdir())
    assert len(err.strip().splitlines()) == 1 and "'rodimus'" in err


def test_bad_settings_get_one_clear_line(teacher: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    short = tmp_path / "short.txt"
    short.write_text("the cat")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("kept")
    cases = [
        ([str(teacher), "--to", "rodimuss"], "'rodimus'"),
        ([str(teacher), "--data", str(short), "--context", "32"], "too short"),
        ([str(teacher), "--data", "missing.txt"], "missing.txt"),
        ([str(teacher), "--out", str(full)], "not empty"),
        ([str(teacher), "--out", str(teacher)], "own folder"),
        (["someone/some-model"], "cannot be reached"),
        ([str(tmp_path / "nowhere")], "no such folder"),
        ([str(teacher), "--option", "windw=3"], "windw"),
        ([str(teacher), "--keep-softmax", "9"], "layer 9"),
        ([str(teacher), "--tokens", "many"], "many"),
    ]
    for arguments, words in cases:
        _check_refused(arguments, words, tmp_path, capsys, monkeypatch)


# ---------------------------------------------------------------------- being killed


def _kill_when(process: subprocess.Popen, ready: Callable[[], bool]) -> None:
    while not ready() and process.poll() is None:
        time.sleep(0.002)
    assert process.poll() is None, "the run ended before it could be killed: " + process.communicate()[1]
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_in_every_stage_and_resumed_equals_undisturbed(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    arguments = convert_arguments(teacher, "--tokens", "30k", "--seed", "3")
    code, _, err = run(*arguments, cwd=tmp_path / "a")
    assert code == 0, err
    partial = tmp_path / "b" / "student.partial"
    marks = [
        lambda: (partial / "results.json").exists(),  # in surgery
        lambda: (partial / "transfer.safetensors").exists(),
        lambda: (partial / "lora.safetensors").exists(),
        lambda: (partial / "control_lora.safetensors").exists(),
        lambda: (partial / "student").exists() or (partial / "student.partial").exists(),  # in export or the gate
    ]
    for mark in marks:
        _kill_when(start(*arguments, "--resume", cwd=tmp_path / "b"), mark)
        assert not (tmp_path / "b" / "student").exists()
    code, _, err = run(*arguments, cwd=tmp_path / "b")
    assert code == 2 and "--resume" in err
    code, _, err = run(*convert_arguments(teacher, "--tokens", "30k", "--seed", "4", "--resume"), cwd=tmp_path / "b")
    assert code == 2 and "seed" in err
    code, _, err = run(*arguments, "--resume", cwd=tmp_path / "b")
    assert code == 0, err
    undisturbed, resumed = (load_file(tmp_path / x / "student" / "model.safetensors") for x in "ab")
    assert undisturbed.keys() == resumed.keys()
    assert all(torch.equal(undisturbed[name], resumed[name]) for name in resumed)
