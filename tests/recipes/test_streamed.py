"""Streamed conversions: a model larger than the memory of the process, and stages after a streamed transfer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.convert.errors import ConversionError
from linearize.convert.layer_stream import LayerStream
from linearize.distill.data import TokenBlocks
from linearize.distill.evaluate.language import score_language
from linearize.distill.stages import Lora, Transfer
from linearize.distill.streaming import score_streamed
from linearize.recipes import Recipe, run
from tests.families import random_teacher, tiny_tokenizer

TEXT = "the cat sat on the mat and looked at the hat. " * 400
STAGE = {"kind": "transfer", "stream": True, "tokens": 512, "batch_size": 2, "learning_rates": {"new": 1e-2}}


def _teacher(folder: Path, **changes: int) -> Path:
    random_teacher("llama", **changes).save_pretrained(folder)
    tiny_tokenizer(folder)
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


def _recipe(teacher: Path, **changes: object) -> Recipe:
    values = {
        "teacher": str(teacher), "to": "gla", "options": {"window": 8}, "data": str(teacher.parent / "text.txt"),
        "context": 64, "heldout_context": 64, "heldout_tokens": 256, "calibration_tokens": 128, "device": "cpu",
        "stages": [STAGE], **changes,
    }  # fmt: skip
    return Recipe.model_validate(values)


def test_a_streamed_conversion_is_a_student_like_any_other(tmp_path: Path) -> None:
    teacher = _teacher(tmp_path / "teacher")
    summary = run(_recipe(teacher, keep_softmax="2"), tmp_path / "student")
    assert summary.gate["passed"] and summary.perplexity.surgery is None
    assert summary.tokens == {"transfer": 512} and len(summary.stages) == 1
    assert "after surgery" not in summary.to_text() and "not generated" in summary.to_text()
    errors = json.loads((tmp_path / "student" / "linearize.json").read_text())["layer_errors"]["student"]
    assert errors.pop(2) is None and all(0 < error < 1 for error in errors) and len(errors) == 3
    done = subprocess.run(
        [sys.executable, "-m", "linearize.recipes.cli", "verify", str(tmp_path / "student")], capture_output=True
    )
    assert done.returncode == 0, done.stdout
    student, whole = (AutoModelForCausalLM.from_pretrained(d) for d in (tmp_path / "student", teacher))
    ids = torch.tensor(AutoTokenizer.from_pretrained(teacher)(TEXT[-900:]).input_ids)
    blocks = TokenBlocks(ids, 32)
    streamed = score_streamed(
        LayerStream(teacher, torch.float32), LayerStream(tmp_path / "student", torch.float32), blocks, tmp_path / "w"
    )
    expected = score_language(student, blocks, teacher=whole)
    assert streamed.loss == pytest.approx(expected.loss, rel=1e-4)
    assert streamed.kl == pytest.approx(expected.kl, rel=1e-3)


def test_stages_after_it_train_the_whole_model(tmp_path: Path) -> None:
    teacher = _teacher(tmp_path / "teacher")
    rates = {"new": 1e-2, "adapters": 1e-3}
    lora = {"kind": "lora", "tokens": 512, "batch_size": 2, "rank": 4}
    summary = run(_recipe(teacher, stages=[{**STAGE, "learning_rates": rates}, lora]), tmp_path / "student")
    assert summary.gate["passed"] and [stage.name for stage in summary.stages] == ["transfer", "lora"]
    first, second = summary.stages
    assert second.kl < first.kl
    name = "model.layers.1.self_attn.q_proj.weight"
    theirs = load_file(teacher / "model.safetensors")[name]
    assert not torch.equal(load_file(tmp_path / "student" / "model.safetensors")[name], theirs)


def test_only_the_first_stage_can_be_streamed(tmp_path: Path) -> None:
    teacher = _teacher(tmp_path / "teacher")
    stages = [Lora(tokens=64), Transfer(stream=True, learning_rates={"new": 1e-2})]
    with pytest.raises(ConversionError, match="only the first stage"):
        run(_recipe(teacher).model_copy(update={"stages": stages}), tmp_path / "student")


_LIMITED = """
import json, resource, sys, torch
from linearize.recipes import load_recipe, run
held = next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmData"))
limit = held + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
summary = run(load_recipe(sys.argv[1]), sys.argv[2])
print(json.dumps({"passed": summary.gate["passed"], "kl": summary.kl, "limit": limit}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a limit on memory needs Linux")
def test_a_model_larger_than_memory_converts(tmp_path: Path) -> None:
    """Weights of 790 MB; the process may allocate 400 MB beyond what its libraries hold."""
    teacher = _teacher(
        tmp_path / "teacher", num_hidden_layers=40, hidden_size=640, intermediate_size=2048, num_attention_heads=10
    )
    weights = (teacher / "model.safetensors").stat().st_size
    allowed = 400 * 2**20
    assert weights > 1.8 * allowed
    limited = {}
    # Untouched holes in the heap are no memory, but this limit counts them: large blocks get mappings of their own.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    for name, stream in (("streamed", True), ("whole", False)):
        recipe = _recipe(teacher, stages=[{**STAGE, "tokens": 128, "batch_size": 1, "stream": stream}], control=False)
        (tmp_path / f"{name}.yaml").write_text(json.dumps(recipe.model_dump(mode="json")))
        limited[name] = subprocess.run(
            [sys.executable, "-c", _LIMITED, str(tmp_path / f"{name}.yaml"), str(tmp_path / name), str(allowed)],
            capture_output=True, text=True, env=environment,
        )  # fmt: skip
    assert limited["streamed"].returncode == 0, limited["streamed"].stderr[-2000:]
    assert json.loads(limited["streamed"].stdout.splitlines()[-1])["passed"]
    assert limited["whole"].returncode != 0 and "memory" in limited["whole"].stderr.lower()
