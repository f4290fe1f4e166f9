"""Two processes that share a batch train as one does: the same losses, the same tensors, states that fit any number."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from linearize.convert.errors import ConversionError
from linearize.distill import processes
from linearize.distill.progress import Meter
from linearize.distill.sharding import Sharded
from linearize.distill.stages.transfer import Transfer
from tests.processes import DATA, PLACEMENTS, bench, on_processes, results, train_stage

STAGES: list[dict[str, Any]] = [
    {"kind": "transfer"},
    {"kind": "lora", "rank": 4},
    {"kind": "logits", "learning_rates": {"new": 1e-3, "all": 1e-3}},
    {"kind": "hidden"},
]


def _train(folder: Path, stages: list[dict[str, Any]], loop: dict[str, Any], **options: Any) -> None:
    for stage in stages:
        (folder / stage["kind"]).mkdir(parents=True, exist_ok=True)
        train_stage(folder / stage["kind"], stage, loop, num_hidden_layers=2, **options)


def _assert_equal(a: Path, b: Path, tolerance: float = 1e-5, rounded: float = 0.0) -> None:
    """`rounded`: share of elements whose gradient may be all but rounding, of which AdamW makes a whole step."""
    (losses, tensors), (others, other_tensors) = results(a), results(b)
    assert others == pytest.approx(losses, rel=tolerance)
    assert len(set(losses)) == len(losses)
    for name, tensor in tensors.items():
        off = (other_tensors[name] - tensor).abs() > 10 * tolerance
        assert off.float().mean() <= rounded, name


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_two_processes_train_as_one(placement: str, tmp_path: Path) -> None:
    loop = {"steps": 2, "batch_size": 4}
    _train(tmp_path / "one", STAGES, loop)
    on_processes(2, placement, _train, tmp_path / "two", STAGES, loop)
    for stage in STAGES:
        _assert_equal(tmp_path / "one" / stage["kind"], tmp_path / "two" / stage["kind"])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_state_of_two_processes_is_resumed_by_one_and_the_other_way_round(placement: str, tmp_path: Path) -> None:
    stages, loop, half = STAGES[1:2], {"steps": 4, "save_every": 2, "schedule": "constant"}, {"steps": 2}
    _train(tmp_path / "whole", stages, loop)
    on_processes(2, placement, _train, tmp_path / "a", stages, {**loop, **half})
    _train(tmp_path / "a", stages, loop)
    _train(tmp_path / "b", stages, {**loop, **half})
    on_processes(2, placement, _train, tmp_path / "b", stages, loop)
    for run in "ab":
        _assert_equal(tmp_path / "whole" / "lora", tmp_path / run / "lora")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_float32_tensors_beside_a_bfloat16_model_train_in_shards(placement: str, tmp_path: Path) -> None:
    stages, loop = [STAGES[1]], {"steps": 2}
    _train(tmp_path / "one", stages, loop, dtype="bfloat16")
    on_processes(2, placement, _train, tmp_path / "two", stages, loop, dtype="bfloat16")
    _assert_equal(tmp_path / "one" / "lora", tmp_path / "two" / "lora", tolerance=2e-3)


def test_a_batch_that_does_not_divide_is_still_one_batch(tmp_path: Path) -> None:
    """Three rows in two processes and two passes: one part is empty."""
    stages, loop = [STAGES[0], STAGES[1]], {"steps": 2, "batch_size": 3}
    _train(tmp_path / "one", stages, loop)
    on_processes(2, "ddp", _train, tmp_path / "two", stages, loop)
    _assert_equal(tmp_path / "one" / "transfer", tmp_path / "two" / "transfer", rounded=0.005)
    _assert_equal(tmp_path / "one" / "lora", tmp_path / "two" / "lora")
    lean = {**loop, "accumulation": 2, "gradient_checkpointing": True}
    for placement in PLACEMENTS:
        on_processes(2, placement, _train, tmp_path / placement, stages[1:], lean)
        _assert_equal(tmp_path / "one" / "lora", tmp_path / placement / "lora")


def _measure_shards(folder: Path) -> None:
    processes.start(cpu=True)
    work = bench({"kind": "logits", "learning_rates": {"all": 1e-3}}, folder)
    before = {name: p.detach().clone() for name, p in work.student.named_parameters()}
    sharded = Sharded(work.part.objective, work.part.groups)
    pieces = [t for t in sharded.named.values() if isinstance(t, DTensor)]
    assert len(pieces) == len(before) == len(sharded.named)
    held, whole = (sum(p.numel() for p in tensors) for tensors in ((p.to_local() for p in pieces), before.values()))
    assert 0.45 * whole < held < 0.55 * whole
    teacher = sharded.objective.reference.teacher.get_decoder()
    assert all(isinstance(p, DTensor) for p in teacher.parameters())
    with torch.no_grad():
        pieces[0].add_(1)
    sharded.close()
    moved = [name for name, p in work.student.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) == 1


def test_shards_are_half_of_everything_and_come_back_whole(tmp_path: Path) -> None:
    on_processes(2, "fsdp2", _measure_shards, tmp_path)


def _measure_gradients(folder: Path) -> None:
    """In one unit: bfloat16 in pieces, float32 whole."""
    processes.start(cpu=True)
    stage = {"kind": "lora", "rank": 4, "learning_rates": {"new": 1e-3, "adapters": 1e-3, "mixer": 1e-3}}
    work = bench(stage, folder, dtype="bfloat16", num_hidden_layers=1)
    sharded = Sharded(work.part.objective, work.part.groups)
    assert {isinstance(t, DTensor) for t in sharded.named.values()} == {True, False}
    with sharded.micro_batch(last=True):
        sharded.backward(sharded.objective(DATA.batch(processes.rank(), 2, 0)))
    gradients = [sharded.whole(t.grad) for t in sharded.named.values() if t.grad is not None]
    for gradient in gradients:  # every process has the mean, not its own
        assert torch.equal(processes.summed(gradient) / 2, gradient)
    norm = torch.stack([g.float().square().sum() for g in gradients]).sum().sqrt()
    assert float(sharded.clip(1e-2)) == pytest.approx(float(norm), rel=1e-3) and norm > 1e-2
    clipped = [sharded.whole(t.grad) for t in sharded.named.values() if t.grad is not None]
    assert float(torch.stack([g.float().square().sum() for g in clipped]).sum().sqrt()) == pytest.approx(1e-2, rel=1e-2)


def test_gradients_in_pieces_and_whole_ones_are_averaged_and_clipped_together(tmp_path: Path) -> None:
    on_processes(2, "fsdp2", _measure_gradients, tmp_path)


def _train_and_die(folder: Path, stages: list[dict[str, Any]], loop: dict[str, Any], step: int) -> None:
    update = Meter.update

    def deadly(self: Meter, done: int, *arguments: Any) -> None:
        update(self, done, *arguments)
        if done >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    Meter.update = deadly  # type: ignore[method-assign]
    _train(folder, stages, loop)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_two_processes_that_were_killed_go_on_as_if_undisturbed(placement: str, tmp_path: Path) -> None:
    stages, loop = STAGES[:1], {"steps": 5, "save_every": 2}
    step = random.Random(os.environ.get("KILL_SEED", 0)).randint(1, 4)
    on_processes(2, placement, _train, tmp_path / "whole", stages, loop)
    on_processes(2, placement, _train_and_die, tmp_path / "killed", stages, loop, step, dies=True)
    on_processes(2, placement, _train, tmp_path / "killed", stages, loop)
    (losses, tensors), (others, other_tensors) = (results(tmp_path / run / "transfer") for run in ("whole", "killed"))
    assert others == losses and all(torch.equal(other_tensors[name], tensors[name]) for name in tensors)


def _refused(stage: Transfer, folder: Path) -> None:
    with pytest.raises(ConversionError, match="teacher_forced"):
        train_stage(folder, stage.model_dump(exclude_defaults=True) | {"kind": "transfer"}, {"steps": 1})


def test_what_does_not_train_in_shards_is_refused(tmp_path: Path) -> None:
    on_processes(2, "fsdp2", _refused, Transfer(teacher_forced=False), tmp_path)


def _speak(folder: Path) -> None:
    processes.start(cpu=True)
    rank = processes.rank()
    assert processes.count() == 2 and processes.is_main() is (rank == 0)
    assert processes.on_main(lambda: {"rank": rank}) == {"rank": 0}
    assert processes.from_any("second" if rank else None) == "second"

    def fail() -> None:
        raise ConversionError("only the first knows")

    with pytest.raises(ConversionError, match="only the first knows"):
        processes.on_main(fail)
    total = torch.tensor(2.0 if rank else 1.0)
    with processes.part_of_batch(0.25 + 0.5 * rank):
        assert float(processes.common(total)) == 3 * (0.25 + 0.5 * rank)
    assert processes.common(total) is total


def test_the_first_process_decides_and_all_fail_together(tmp_path: Path) -> None:
    on_processes(2, "ddp", _speak, tmp_path)
