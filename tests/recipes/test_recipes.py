"""Recipes: every built-in one end to end, both written forms, what is refused, resuming in every stage."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from linearize.convert.errors import ConversionError
from linearize.convert.verify import verify
from linearize.distill.stages import STAGES, Lora, Transfer
from linearize.recipes import pipeline
from linearize.recipes.builtin import about, builtin_recipes
from linearize.recipes.comparison import compare_recipes, to_markdown
from linearize.recipes.defaults import stages_of, with_tokens
from linearize.recipes.forms import to_python, to_yaml
from linearize.recipes.schema import Recipe, load_recipe
from tests.families import random_teacher, tiny_tokenizer

WORDS = ["the", "cat", "sat", "on", "mat", "and", "looked", "at", "hat", "of", "other"]
TEXT = "<|endoftext|>".join(" ".join(random.Random(i).choices(WORDS, k=3)) for i in range(1500))
NAMES = list(builtin_recipes())

EVERY_STAGE = """
to: rodimus
options: {window: 4}
context: 40
heldout_tokens: 200
control: false
stages:
  - {kind: transfer, tokens: 500, window_dropout: 0.3, schedule: plateau}
  - {kind: matrix, tokens: 300, context: 8}
  - {kind: hidden, tokens: 300}
  - {kind: anneal, option: window, values: [4, 2], tokens: 600}
  - {kind: lora, tokens: 500, rank: 2, targets: [q_proj, mlp]}
  - {kind: stepwise, rounds: 2, tokens: 600, schedule: wsd}
  - {kind: logits, tokens: 500, top_k: 8}
  - {kind: context, tokens: 500, context: 80}
  - {kind: sft, tokens: 500}
  - {kind: preference, tokens: 500, beta: 0.1, rank: 2}
"""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "teacher"
    random_teacher("llama", max_position_embeddings=64, num_hidden_layers=2, bos_token_id=1).save_pretrained(folder)
    tiny_tokenizer(folder)
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def quick_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate in this process: `tests/recipes/test_convert.py` runs it in a fresh one."""
    monkeypatch.setattr(pipeline, "verify_in_fresh_process", verify)


def small(name: str, teacher: Path) -> Recipe:
    """A built-in recipe with its own stages, rates and schedules, at the size of a test."""
    recipe = load_recipe(name)
    changes: dict[str, Any] = {"teacher": str(teacher), "data": str(teacher.parent / "text.txt"), "heldout_tokens": 200}
    changes |= {"context": 48, "calibration_tokens": 64, "control": recipe.control and name == "default"}
    stages = [
        s.model_copy(update={"batch_size": 1, "context": s.context and min(s.context, 96)}) for s in stages_of(recipe)
    ]
    return with_tokens(Recipe.model_validate({**recipe.model_dump(), **changes, "stages": stages}), 1500)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs_to_its_end(name: str, teacher: Path, tmp_path: Path, quick_gate: None) -> None:
    summary = pipeline.run(small(name, teacher), tmp_path / "student")
    assert summary.gate["passed"], [check for check in summary.gate["checks"] if not check["passed"]]
    ran = [stage.name for stage in summary.stages]
    assert ran == [stage.label for stage in stages_of(load_recipe(name))]
    assert all(stage.tokens and stage.peak_memory and stage.kl is not None for stage in summary.stages)
    assert summary.kl == summary.stages[-1].kl
    record = json.loads((tmp_path / "student" / "linearize.json").read_text())
    assert set(ran) <= set(record["losses"]) and set(record["manifest"]) == set(ran)
    for groups in record["manifest"].values():
        assert all(group["learning_rate"] > 0 and group["tensors"] for group in groups)
    assert f"after {ran[0]}" in summary.to_text() or len(ran) == 1


# ---------------------------------------------------------------------- forms


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_load_back(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    for file, text in ((tmp_path / "r.yaml", to_yaml(recipe)), (tmp_path / "r.py", to_python(recipe))):
        file.write_text(text)
        assert load_recipe(file) == recipe, text
    assert {"Cost:", "Numbers:"} <= set(about(builtin_recipes()[name]).split())
    lines = to_yaml(recipe).splitlines()
    assert all("  # " in line for line in lines[1:] if not line.lstrip().startswith("- kind"))


def test_a_python_recipe_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from linearize.distill.stages import Lora, Transfer\n"
        "from linearize.recipes import Recipe\n"
        "recipe = Recipe(to='gla', stages=[Transfer(tokens=10), Transfer(name='again', tokens=30), Lora(tokens=60)])\n"
    )
    recipe = load_recipe(file)
    assert recipe.to == "gla" and [stage.label for stage in recipe.stages or ()] == ["transfer", "again", "lora"]
    assert [stage.tokens for stage in with_tokens(recipe, 1000).stages or ()] == [100, 300, 600]


REFUSED = {
    "layrs: 3": "layrs = 3",
    "stages: [{kind: transfr}]": "stages.0.kind = 'transfr'",
    "stages: [{tokens: 3}]": "stages.0",
    "stages: [{kind: lora, rnk: 3}]": "stages.0.rnk = 3",
    "stages: [{kind: lora, tokens: -1}]": "stages.0.tokens = -1",
    "stages: [{kind: lora, learning_rates: {adapter: 0.1}}]": "stages.0.learning_rates.adapter",
    "stages: [{kind: lora, learning_rates: {new: 0}}]": "stages.0.learning_rates",
    "stages: [{kind: lora, schedule: cosin}]": "stages.0.schedule = 'cosin'",
    "stages: [{kind: lora}, {kind: lora}]": "two stages are named 'lora'",
    "stages: [{kind: logits, cache: x}]": "cache needs top_k",
    "stages: [{kind: preference, learning_rates: {all: 0.1}}]": "only 'adapters'",
    "stages: [{kind: lora, targets: [k_prj]}]": "'k_prj'",
    "stages: [{kind: anneal}]": "'chunk'",
    "stages: [{kind: sft, data: nowhere.jsonl}]": "nowhere.jsonl",
    "stages: [{kind: lora, data: ./nowhere.txt}]": "nowhere.txt",
    "to: [": "YAML",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_wrong_is_said_before_any_work(text: str, teacher: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    data = {"teacher": str(teacher), "data": str(teacher.parent / "text.txt"), "context": 32}
    with pytest.raises(ConversionError) as refused:
        recipe = load_recipe(file)
        pipeline.run(Recipe.model_validate({**recipe.model_dump(), **data}), tmp_path / "out")
    assert REFUSED[text] in str(refused.value), refused.value
    assert list(tmp_path.iterdir()) == [file]


def test_a_python_recipe_that_fails_is_bad_input(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for text, words in (
        ("recipe = 3", "recipe = Recipe"),
        ("import nowhere", "ModuleNotFoundError"),
        ("from linearize.distill.stages import Lora\nLora(tokens=-3)", "tokens = -3"),
    ):
        file.write_text(text)
        with pytest.raises(ConversionError, match=words):
            load_recipe(file)
    with pytest.raises(ConversionError, match="recipes ls"):
        load_recipe("lolcat")


def test_every_stage_documents_every_key() -> None:
    for stage in STAGES.values():
        for key, field in stage.model_fields.items():
            assert field.description or key == "kind", f"{stage.__name__}.{key}"


def test_the_default_is_what_a_bare_recipe_does() -> None:
    assert load_recipe("default") == Recipe()
    transfer, lora = stages_of(Recipe())
    assert isinstance(transfer, Transfer) and isinstance(lora, Lora)
    assert (transfer.tokens, lora.tokens) == (200_000, 100_000)
    assert lora.learning_rates == {"new": 3e-3, "adapters": 5e-4}
    assert stages_of(Recipe(options={"window": 0}))[1].learning_rates["adapters"] == 1e-3


# ---------------------------------------------------------------------- commands


def _linearize(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "linearize.recipes.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_help_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom linearize.recipes.cli import app\n"
        "from typer.main import get_command\nget_command(app)\n"
        "print([m for m in ('torch', 'transformers', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_recipes_are_listed_shown_and_copied(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from linearize.recipes.cli import main

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["linearize", "recipes", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out + err

    monkeypatch.chdir(tmp_path)
    assert all(name in run("ls")[1] for name in NAMES)
    code, text = run("show", "lolcats")
    assert code == 0 and "2410.10254" in text and "scale: 1000.0" in text
    assert run("cp", "rodimus++")[0] == 0 and run("cp", "rodimus++", "--yaml")[0] == 0
    copies = {
        load_recipe(tmp_path / f"rodimus_plus_plus{suffix}") == load_recipe("rodimus++") for suffix in (".py", ".yaml")
    }
    assert copies == {True}
    code, text = run("cp", "rodimus++")
    assert code == 2 and "--force" in text
    code, text = run("show", "lolcat")
    assert code == 2 and "lolcats" in text


def test_recipes_are_compared_at_equal_tokens(teacher: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("to: swa\noptions: {window: 8}\nheldout_tokens: 200\nstages: [{kind: lora, rank: 2}]\n")
    broken = tmp_path / "broken.yaml"
    broken.write_text("to: gla\noptions: {window: 0}\nheldout_tokens: 200\nstages: [{kind: matrix}]\n")
    more = ["--data", str(teacher.parent / "text.txt"), "--context", "32"]
    rows = compare_recipes(str(teacher), 300, [str(mine), str(broken)], tmp_path / "out", more)
    good, bad = rows
    assert good.loss and good.kl is not None and good.tokens >= 300 and good.peak_memory > 2**20 and good.seconds > 0
    assert bad.loss is None and "not linear" in (bad.problem or "")
    stored = (tmp_path / "out" / "comparison.md").read_text()
    assert stored == to_markdown(rows, str(teacher), 300) and f"{good.loss:.4f}" in stored and "failed" in stored
    assert len(json.loads((tmp_path / "out" / "comparison.json").read_text())) == 2


# ---------------------------------------------------------------------- being killed


def _run_and_die(recipe: Recipe, out: Path, stage: str, step: int) -> None:
    """Convert, and be killed at a step of a stage, before its state is next saved."""
    from linearize.distill import trainer
    from linearize.distill.progress import Meter

    update = Meter.update

    def deadly(self: Meter, done: int, *arguments: Any) -> None:
        update(self, done, *arguments)
        if self.name == stage and done >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    assert trainer
    Meter.update = deadly  # type: ignore[method-assign]
    pipeline.run(recipe, out, resume=True)


def test_killed_at_any_step_of_any_stage_and_resumed_equals_undisturbed(
    teacher: Path, tmp_path: Path, quick_gate: None
) -> None:
    file = tmp_path / "every.yaml"
    file.write_text(EVERY_STAGE)
    given = {"teacher": str(teacher), "data": str(teacher.parent / "text.txt")}
    recipe = Recipe.model_validate({**load_recipe(file).model_dump(), **given})
    summary = pipeline.run(recipe, tmp_path / "a")
    assert [stage.kind for stage in summary.stages] == [stage.kind for stage in recipe.stages or ()]
    assert set(summary.tokens) == {stage.kind for stage in summary.stages} == set(STAGES)
    steps = {stage.name: len(losses) for stage, losses in _losses(tmp_path / "a", summary.stages)}
    rng = random.Random(os.environ.get("KILL_SEED", 0))
    for stage in summary.stages:
        rounds = 2 if stage.kind in ("anneal", "stepwise") else 1
        step = rng.randint(1, max(1, steps[stage.name] // rounds - 1))
        child = multiprocessing.get_context("fork").Process(
            target=_run_and_die, args=(recipe, tmp_path / "b", stage.name, step)
        )
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL, f"{stage.name} was not killed: {child.exitcode}"
        assert (tmp_path / "b.partial").exists() and not (tmp_path / "b").exists()
    pipeline.run(recipe, tmp_path / "b", resume=True)
    undisturbed, resumed = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert undisturbed.keys() == resumed.keys()
    assert all(torch.equal(undisturbed[name], resumed[name]) for name in resumed)


def _losses(folder: Path, stages: Any) -> list[tuple[Any, list[float]]]:
    losses = json.loads((folder / "linearize.json").read_text())["losses"]
    return [(stage, losses[stage.name]) for stage in stages]


@pytest.mark.parametrize(("flags", "wanted"), [([], True), (["--no-compile", "--seed", "7"], False)], ids=str)
def test_flags_win_over_the_file(
    flags: list[str], wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from linearize.recipes.cli import main

    class Seen(Exception):
        pass

    def run(recipe: Recipe, *_: Any) -> None:
        raise Seen(recipe.compile, recipe.seed)

    file = tmp_path / "mine.yaml"
    file.write_text("to: gla\ncompile: true\nseed: 3\n")
    monkeypatch.setattr(pipeline, "run", run)
    monkeypatch.setattr(sys, "argv", ["linearize", "convert", "llama", "--recipe", str(file), *flags])
    with pytest.raises(Seen) as found:
        main()
    assert found.value.args == (wanted, 7 if flags else 3)
