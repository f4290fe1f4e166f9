"""Stages and the loop: what trains, what it learns, that nothing else moves."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from linearize.convert import as_teacher, build_student
from linearize.convert.calibration import routed, teacher_route
from linearize.convert.surgery import new_parameters
from linearize.distill.adapters import merge_adapters
from linearize.distill.data import TokenBlocks
from linearize.distill.evaluate.language import score_language
from linearize.distill.reference import teacher_logits
from linearize.distill.schedules import RateSchedule
from linearize.distill.stages import Lora, Stage, Transfer, Workbench
from linearize.distill.trainer import LoopConfig, NonFiniteLoss, train
from tests.families import random_teacher

DATA = TokenBlocks(torch.randint(2, 64, (64 * 32,), generator=torch.Generator().manual_seed(0)), 32)


def _bench(state: Path, family: str = "qwen2", **options: object) -> Workbench:
    teacher = random_teacher(family)
    student = build_student(teacher, "rodimus", calibration=DATA.blocks[:4], **{"window": 8, **options})
    return Workbench(student, teacher, frozenset(new_parameters(student)), DATA, 1, 1, 0, state)


def _student(**options: object) -> torch.nn.Module:
    return _bench(Path(), **options).student


def _only_round(stage: Stage, bench: Workbench) -> tuple[torch.nn.Module, list[dict]]:
    (part,) = stage.prepare(bench)
    return part.objective, part.groups


def test_transfer_equals_its_formula_and_learns(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    student, ids = bench.student, DATA.blocks[:2]
    objective, groups = _only_round(Transfer(learning_rates={"new": 1e-2}), bench)
    loss = objective(ids)
    wanted = []

    def by_hand(mixer, hidden_states, **kwargs):
        target, _ = teacher_route(mixer, hidden_states, **kwargs)
        mine, _ = mixer.attend(hidden_states, position_embeddings=kwargs["position_embeddings"])
        wanted.append(((mine - target) ** 2).sum() / (target**2).sum())
        return target, None

    with torch.no_grad(), routed(student.mixers, by_hand):
        student.get_decoder()(input_ids=ids, use_cache=False)
    assert float(loss) == pytest.approx(float(torch.stack(wanted).mean()), rel=1e-4)

    frozen = {n: p.clone() for n, p in student.named_parameters() if not p.requires_grad}
    log = train("transfer", objective, groups, DATA, LoopConfig(30, 4, 0), tmp_path / "t.safetensors")
    assert sum(log.losses[-5:]) < 0.9 * sum(log.losses[:5])
    assert all(torch.equal(dict(student.named_parameters())[n], p) for n, p in frozen.items())


def test_lora_moves_the_student_towards_an_unmoved_teacher(tmp_path: Path) -> None:
    bench = _bench(tmp_path, window=0)
    student = bench.student
    before = teacher_logits(student, DATA.blocks[:2])
    stage = Lora(rank=4, alpha=8, learning_rates={"new": 1e-2, "adapters": 1e-2}, ce_weight=0)
    objective, groups = _only_round(stage, bench)
    trained = {n for g in groups for n in g["params"]}
    assert all("lora_" in n or ".recurrence." in n or ".branch." in n for n in trained), trained
    start = score_language(student, DATA)
    train("lora", objective, groups, DATA, LoopConfig(40, 4, 0), tmp_path / "l.safetensors")
    end = score_language(student, DATA)
    assert end.kl < 0.9 * start.kl and end.teacher_loss == pytest.approx(start.teacher_loss, abs=1e-6)
    assert torch.equal(teacher_logits(student, DATA.blocks[:2]), before)
    with torch.no_grad():
        adapted = student(DATA.blocks[:2], use_cache=False).logits
        merge_adapters(student)
        assert not any("lora_" in n for n, _ in student.named_parameters())
        torch.testing.assert_close(student(DATA.blocks[:2], use_cache=False).logits, adapted, rtol=1e-4, atol=1e-4)
        with as_teacher(student):
            assert torch.equal(student(DATA.blocks[:2], use_cache=False).logits, before)


def test_scores_equal_a_plain_loop() -> None:
    student = _student()
    score = score_language(student, DATA)
    losses, kls, hits = [], [], []
    with torch.no_grad():
        for row in DATA.blocks:
            logits = student(row[None], use_cache=False).logits[0, :-1].double()
            reference = teacher_logits(student, row[None])[0, :-1].double()
            for q, p, label in zip(logits, reference, row[1:], strict=True):
                losses.append(-q.log_softmax(-1)[label])
                kls.append((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum())
                hits.append(q.argmax() == p.argmax())
    assert score.loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert score.kl == pytest.approx(float(torch.stack(kls).mean()), rel=1e-4)
    assert score.top1_agreement == pytest.approx(float(torch.stack(hits).double().mean()))
    assert score.tokens == len(losses)


class _Quadratic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.weight * ids.float().mean()).square().sum()


def test_a_stopped_loop_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    class Stopping(_Quadratic):
        calls = 0

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 8:
                raise Stop
            return super().forward(ids)

    def go(objective: torch.nn.Module, name: str) -> list[float]:
        groups = [{"params": {"weight": objective.weight}, "lr": 0.1}]
        return train("test", objective, groups, DATA, LoopConfig(20, 2, 0, save_every=3), tmp_path / name).losses

    whole, broken, again = _Quadratic(), Stopping(), _Quadratic()
    expected = go(whole, "a.safetensors")
    with pytest.raises(Stop):
        go(broken, "b.safetensors")
    assert go(again, "b.safetensors") == expected and torch.equal(again.weight, whole.weight)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_state(tmp_path: Path) -> None:
    class Exploding(_Quadratic):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * (float("inf") if self.weight[0] < 0.6 else 1.0)

    objective = Exploding()
    groups = [{"params": {"weight": objective.weight}, "lr": 0.1}]
    with pytest.raises(NonFiniteLoss, match="step"):
        train("test", objective, groups, DATA, LoopConfig(50, 2, 0, save_every=1), tmp_path / "s.safetensors")
    assert (tmp_path / "s.safetensors").exists() and (tmp_path / "s.bad_batch.safetensors").exists()


def _rates(kind: str, losses: list[float], **settings: float) -> list[float]:
    schedule = RateSchedule(kind, len(losses), **{"warmup": 0.1, "final_rate": 0.1, **settings})
    rates = []
    for step, loss in enumerate(losses):
        rates.append(schedule.factor(step))
        schedule.observe(loss)
    return rates


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_the_rate_rises_then_falls(kind: str) -> None:
    rates = _rates(kind, [1.0] * 100)
    assert rates[9] == max(rates) == 1 and rates[0] == pytest.approx(0.1) and 0.1 <= rates[-1] < 0.16
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    if kind == "wsd":
        assert rates[81] == 1 and rates[91] == pytest.approx(0.1 + 0.9 * 0.5, abs=0.03)


def test_plateau_halves_the_rate_when_the_loss_stands_still() -> None:
    falling = _rates("plateau", [1 / (step + 1) for step in range(100)])
    assert falling[10:] == [1.0] * 90
    still = _rates("plateau", [1.0] * 100)
    assert still[10:20] == [1.0] * 10 and still[20] == 0.5 and still[25] == 0.25 and min(still) == 0.1
