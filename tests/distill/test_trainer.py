"""The loop's options: what saves memory changes nothing, what breaks is named, every step is written down."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import tracking
from safetensors.torch import load_file

from linearize.convert.errors import ConversionError
from linearize.distill import loss_log
from linearize.distill.conversations import Examples
from linearize.distill.layout import IGNORED
from linearize.distill.loss_log import COLUMNS, read_rows
from linearize.distill.placement import Placement, adamw
from linearize.distill.trainer import LoopConfig, NonFiniteLoss, parts_of, train
from tests.processes import DATA, bench, results, train_stage

STAGES = [
    {"kind": "lora", "rank": 4},
    {"kind": "transfer", "loss": "mse"},
    {"kind": "transfer", "teacher_forced": False},
]


@pytest.mark.parametrize("stage", STAGES, ids=str)
@pytest.mark.parametrize("saving", [{"gradient_checkpointing": True}, {"accumulation": 2}], ids=str)
def test_what_saves_memory_changes_nothing(stage: dict[str, Any], saving: dict[str, Any], tmp_path: Path) -> None:
    if stage.get("teacher_forced") is False and "accumulation" in saving:
        pytest.skip("a ratio of sums is not a mean of ratios: normalized errors of passes are averaged")
    for name, options in (("plain", {}), ("saving", saving)):
        (tmp_path / name).mkdir()
        train_stage(tmp_path / name, stage, {"steps": 3, **options})
    (plain, tensors), (saved, others) = results(tmp_path / "plain"), results(tmp_path / "saving")
    assert saved == pytest.approx(plain, rel=1e-5)
    for name in tensors:
        torch.testing.assert_close(others[name], tensors[name], rtol=0, atol=1e-4, msg=name)


def test_gradient_checkpointing_makes_activations_again_and_is_off_afterwards(tmp_path: Path) -> None:
    counts = {}
    for wanted in (False, True):
        work = bench({"kind": "lora", "rank": 4}, tmp_path)
        calls = [0]
        mlp = work.student.model.layers[1].mlp
        mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        config = LoopConfig(1, 2, 0, gradient_checkpointing=wanted)
        train("lora", work.part.objective, work.part.groups, DATA, config, tmp_path / f"{wanted}.safetensors")
        counts[wanted] = calls[0]
        assert not any(getattr(module, "gradient_checkpointing", False) for module in work.student.modules())
    assert counts == {False: 2, True: 3}  # the teacher's pass, the student's, and the student's again


@pytest.mark.parametrize(
    "stage", [{"kind": "lora"}, {"kind": "transfer"}, {"kind": "transfer", "at": "heads"}], ids=str
)
def test_compiled_parts_learn_the_same(stage: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_eagerly(function: Any, compile: Any = torch.compile) -> Any:
        compiled.append(function.__name__)
        return compile(function, backend="eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    losses = []
    for name, wanted in (("plain", False), ("compiled", True)):
        work = bench({**stage, "rank": 4}, tmp_path, "llama", num_hidden_layers=1)
        config = LoopConfig(3, 2, 0, compile=wanted)
        log = train(
            stage["kind"], work.part.objective, work.part.groups, DATA, config, tmp_path / f"{name}.safetensors"
        )
        losses.append(log.losses)
        assert not any({"mix_and_project", "forward"} & set(vars(module)) for module in work.student.modules())
        assert not any("forward" in vars(mixer.attention) for mixer in work.student.mixers)
    error = ["_scaled_error"] if stage["kind"] == "transfer" else []
    assert compiled == ["mix_and_project", "forward", "forward", *error]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_loss_that_is_not_finite_names_step_and_layer_and_keeps_the_batch(tmp_path: Path) -> None:
    work = bench({"kind": "lora", "rank": 4}, tmp_path)
    broken = work.student.model.layers[2].mlp.up_proj

    def poison(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.inf if poison.step >= 5 else output  # type: ignore[attr-defined]

    poison.step = 0  # type: ignore[attr-defined]
    work.student.model.embed_tokens.register_forward_pre_hook(
        lambda *_: setattr(poison, "step", poison.step + 0.5)  # type: ignore[attr-defined]
    )
    broken.register_forward_hook(poison)
    state = tmp_path / "lora.safetensors"
    with pytest.raises(
        NonFiniteLoss, match=r"lora: the loss is (nan|inf) at step 4, first in model.layers.2.mlp.up_proj"
    ):
        train("lora", work.part.objective, work.part.groups, DATA, LoopConfig(20, 2, 0, save_every=2), state)
    assert torch.equal(load_file(state.with_suffix(".bad_batch.safetensors"))["input_ids"], DATA.batch(4, 2, 0))
    kept = load_file(state)
    assert all(t.isfinite().all() for t in kept.values()) and {
        float(t) for n, t in kept.items() if n.startswith("step.")
    } == {4}


class _BadGradient(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.weight - self.weight.detach()).square().sum().sqrt()  # 0, of infinite slope


def test_a_gradient_that_is_not_finite_moves_nothing(tmp_path: Path) -> None:
    objective = _BadGradient()
    groups = [{"params": {"weight": objective.weight}, "lr": 0.1}]
    with pytest.raises(NonFiniteLoss, match="the gradient is nan at step 0, behind the layers; no state was saved yet"):
        train("test", objective, groups, DATA, LoopConfig(5, 2, 0, save_every=1), tmp_path / "s.safetensors")
    assert torch.equal(objective.weight, torch.ones(3))


@pytest.mark.parametrize("bad", [None, "loss", "gradient"])
def test_the_fused_update_is_the_plain_one_and_skips_what_is_not_finite(
    bad: str | None,
) -> None:
    found = []
    for fused in (False, True):
        weights = {name: torch.nn.Parameter(torch.linspace(-1, 1, n)) for name, n in (("a", 3), ("b", 5))}
        placement = Placement(torch.nn.Module(), [{"params": weights, "lr": 0.1}])
        placement.optimizer = adamw([{"params": weights, "lr": 0.1}], fused)
        for step in range(4):
            loss = sum(((weight - step) ** 3).sum() for weight in weights.values())
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            if step == 2 and bad == "gradient":
                weights["b"].grad.fill_(torch.nan)  # type: ignore[union-attr]
            before = [weight.detach().clone() for weight in weights.values()]
            placement.step(1.0, loss.detach() * (torch.inf if step == 2 and bad == "loss" else 1))
            moved = [not torch.equal(a, b) for a, b in zip(before, weights.values(), strict=True)]
            assert moved == [step != 2 or bad is None] * 2
            if step == 1:  # the state goes through a file, and on
                placement.load_moments(placement.moments())
        moments = placement.moments()
        assert {float(state["step"]) for state in moments.values()} == {4 if bad is None else 3}
        found.append(
            [*weights.values(), *(moments[name][key] for name in weights for key in ("exp_avg", "exp_avg_sq"))]
        )
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-5, atol=1e-7)


class _Slope(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.weight * ids.float().mean()).square().sum()


def _go(folder: Path, steps: int, name: str = "a", **options: Any) -> list[float]:
    objective = _Slope()
    groups = [{"params": {"weight": objective.weight}, "lr": 0.1}]
    config = LoopConfig(steps, 2, 0, schedule="constant", save_every=3, **options)
    return train("test", objective, groups, DATA, config, folder / f"{name}.safetensors").losses


def test_every_step_stands_once_in_the_csv_file_whatever_was_killed(tmp_path: Path) -> None:
    _go(tmp_path, 3)
    with open(tmp_path / "losses.csv", "a") as handle:
        handle.write("a,4,0.5,1,1,1\na,5,0")  # of a run that was killed before its next state
    losses = _go(tmp_path, 6)
    other = _go(tmp_path, 2, "b")
    rows = read_rows(tmp_path / "losses.csv")
    assert [(row[0], int(row[1])) for row in rows] == [("a", i) for i in range(1, 7)] + [("b", 1), ("b", 2)]
    assert [float(row[2]) for row in rows] == losses + other
    assert all(float(row[4]) > 0 and int(row[5]) > 2**20 for row in rows)
    with open(tmp_path / "losses.csv") as handle:
        assert tuple(next(csv.reader(handle))) == COLUMNS


def test_trackers_get_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Tracker:
        def __init__(self, run_name: str, **options: Any) -> None:
            seen.append((run_name, options))

        def start(self) -> None:
            seen.append("start")

        def log(self, values: dict[str, Any], step: int) -> None:
            seen.append((step, set(values)))

        def finish(self) -> None:
            seen.append("finish")

    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, Tracker)
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__spec__ = type(csv.__spec__)(name, None)  # type: ignore[union-attr]
    _go(tmp_path, 2, report_to=("tensorboard", "wandb"))
    assert ("a", {"logging_dir": str(tmp_path / "tensorboard")}) in seen and (tmp_path.name, {"name": "a"}) in seen
    assert sum(entry == (2, {"a/loss", "a/rate", "a/tokens_per_second", "a/memory_bytes"}) for entry in seen) == 2
    assert seen.count("start") == seen.count("finish") == 2


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConversionError, match="pip install trackio"):
        loss_log.check_trackers(("trackio",))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("labels", [False, True])
def test_the_parts_of_a_batch_weigh_what_they_hold(
    count: int, passes: int, labels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = DATA.batch(0, 5, 0)
    if labels:
        marks = batch.clone()
        for row in range(5):
            marks[row, : 5 * row + 1] = IGNORED
        batch = torch.stack([batch, marks], 1)
        batch = Examples(batch).batch(0, 5, 0)
    total, rows, shares = 0.0, 0, [0.0] * passes
    for rank in range(count):
        monkeypatch.setattr("linearize.distill.processes.count", lambda: count)
        monkeypatch.setattr("linearize.distill.processes.rank", lambda rank=rank: rank)
        for number, part in enumerate(parts_of(batch, passes)):
            assert len(part.rows)
            rows += len(part.rows) if part.weight else 0
            total += part.weight / count
            shares[number] += part.share
            if labels and part.weight:
                counted = int((part.rows[:, 1, 1:] != IGNORED).sum()) / int((batch[:, 1, 1:] != IGNORED).sum())
                assert part.weight / count == pytest.approx(counted)
    assert total == pytest.approx(1) and rows == 5
    assert all(share == pytest.approx(1) or share == 0 for share in shares)
