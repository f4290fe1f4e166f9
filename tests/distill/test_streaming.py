"""Streamed transfer: the same mixers as training all layers at once, and a run that was killed ends the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linearize.convert import build_student
from linearize.convert.errors import ConversionError
from linearize.convert.layer_stream import LayerStream
from linearize.convert.plan import make_plan
from linearize.convert.surgery import new_parameters
from linearize.distill import trainer
from linearize.distill.data import TokenBlocks
from linearize.distill.parameters import trainable_groups
from linearize.distill.reference import Reference
from linearize.distill.stages.transfer import Transfer, TransferObjective
from linearize.distill.streaming import StreamedLayers, stream_transfer
from tests.families import random_teacher

DATA = TokenBlocks(torch.randint(2, 64, (24 * 32,), generator=torch.Generator().manual_seed(0)), 32)
SETTINGS = Transfer(tokens=12 * 2 * 32, batch_size=2, learning_rates={"new": 1e-2}, clip=1e9)


def _stream(teacher: Path, folder: Path, settings: Transfer = SETTINGS, to: str = "gla") -> StreamedLayers:
    plan = make_plan(4, to, "1", window=8)
    return stream_transfer(LayerStream(teacher, torch.float32), plan, DATA, settings, folder, calibration=4, seed=3)


def _tensors(layers: StreamedLayers) -> dict[str, torch.Tensor]:
    return {name: load_file(file)[name] for name, file in layers.overlay.items()}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layers_one_by_one_learn_what_they_learn_together(family: str, tmp_path: Path) -> None:
    teacher = random_teacher(family)
    teacher.save_pretrained(tmp_path / "teacher")
    streamed = _stream(tmp_path / "teacher", tmp_path / "work")
    mine = _tensors(streamed)
    assert streamed.tokens == SETTINGS.tokens and sorted(streamed.logs) == [0, 2, 3]

    ids = DATA.batch(0, 24, 3)
    student = build_student(teacher, make_plan(4, "gla", "1", window=8))
    fresh = new_parameters(student)
    assert set(mine) == set(fresh)
    # Each layer draws its random start for itself: take the streamed run's, which a run of no steps shows.
    start = _tensors(_stream(tmp_path / "teacher", tmp_path / "none", SETTINGS.model_copy(update={"tokens": 0})))
    with torch.no_grad():
        for name, parameter in fresh.items():
            parameter.copy_(start[name])
    objective = TransferObjective(student, Reference(student, teacher), SETTINGS)
    groups = trainable_groups(student, frozenset(fresh), {"new": 1e-2})
    order = TokenBlocks(torch.arange(24), 1)

    class Together(torch.nn.Module):
        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return 3 * objective(ids[indices[:, 0]])  # its mean over three layers; Adam's epsilon sees the scale

    log = trainer.train(
        "together", Together(), groups, order, trainer.LoopConfig(12, 2, 3, clip=1e9), tmp_path / "state.safetensors"
    )
    assert log.losses[0] == pytest.approx(sum(s.losses[0] for s in streamed.logs.values()), rel=1e-5)
    assert log.losses[-1] == pytest.approx(sum(s.losses[-1] for s in streamed.logs.values()), rel=1e-3)
    moved = [float((mine[n] - start[n]).norm()) for n in fresh]
    apart = [float((mine[n] - p).norm()) for n, p in fresh.items()]
    assert max(moved) > 0.05 and sum(apart) < 0.02 * sum(moved)


def test_a_killed_run_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_teacher("llama").save_pretrained(tmp_path / "teacher")
    settings = SETTINGS.model_copy(update={"learning_rates": {"new": 1e-2, "adapters": 1e-3}})
    whole = _tensors(_stream(tmp_path / "teacher", tmp_path / "whole", settings))
    assert any("q_proj" in name for name in whole)
    calls = 0
    real = trainer.write_state

    def dies_later(*args: object, **named: object) -> None:
        nonlocal calls
        real(*args, **named)
        calls += 1
        if calls in (3, 9):
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "write_state", dies_later)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            _stream(tmp_path / "teacher", tmp_path / "killed", settings)
    resumed = _stream(tmp_path / "teacher", tmp_path / "killed", settings)
    again = _tensors(resumed)
    assert set(again) == set(whole)
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert not list((tmp_path / "killed").glob("hidden-*"))


def test_what_one_layer_cannot_do_alone_is_refused(tmp_path: Path) -> None:
    random_teacher("llama").save_pretrained(tmp_path / "teacher")
    for change, message in (({"teacher_forced": False}, "teacher_forced"), ({"learning_rates": {"all": 1e-3}}, "'all'")):
        with pytest.raises(ConversionError, match=message):
            _stream(tmp_path / "teacher", tmp_path / "work", SETTINGS.model_copy(update=change))
