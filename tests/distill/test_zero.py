"""DeepSpeed ZeRO 2: two processes train as one does, in micro-batches too, and states fit any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import on_processes, results, train_stage

pytest.importorskip("deepspeed", reason="needs deepspeed, which nothing here requires")
STAGES: list[dict[str, Any]] = [{"kind": "transfer"}, {"kind": "lora", "rank": 4}]
DEVICE = "cuda" if torch.cuda.device_count() >= 2 else "cpu"


def _train(folder: Path, loop: dict[str, Any]) -> None:
    for stage in STAGES:
        (folder / stage["kind"]).mkdir(parents=True, exist_ok=True)
        train_stage(folder / stage["kind"], stage, loop, num_hidden_layers=2, device=DEVICE)


def _run(processes: int, *arguments: Any) -> None:
    on_processes(processes, "zero" if processes > 1 else "ddp", _train, *arguments, context="spawn")


def _assert_equal(a: Path, b: Path) -> None:
    tolerance = 1e-5 if DEVICE == "cpu" else 1e-3
    for stage in STAGES:
        (losses, tensors), (others, other_tensors) = results(a / stage["kind"]), results(b / stage["kind"])
        assert others == pytest.approx(losses, rel=tolerance)
        for name, tensor in tensors.items():
            torch.testing.assert_close(other_tensors[name], tensor, rtol=0, atol=20 * tolerance, msg=name)


@pytest.mark.parametrize("change", [{}, {"accumulation": 2}, {"batch_size": 3}], ids=str)
def test_two_processes_train_as_one(change: dict[str, Any], tmp_path: Path) -> None:
    loop = {"steps": 3, "batch_size": 4, **change}
    _run(1, tmp_path / "one", loop)
    _run(2, tmp_path / "two", loop)
    _assert_equal(tmp_path / "one", tmp_path / "two")


def test_a_state_of_two_processes_is_resumed_by_one_and_the_other_way_round(tmp_path: Path) -> None:
    loop = {"steps": 4, "batch_size": 4, "save_every": 2, "schedule": "constant"}
    _run(1, tmp_path / "whole", loop)
    for first, second in ((1, 2), (2, 1)):
        folder = tmp_path / str(first)
        _run(first, folder, {**loop, "steps": 2})
        _run(second, folder, loop)
        _assert_equal(tmp_path / "whole", folder)
