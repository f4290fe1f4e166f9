"""Two GPUs that share a batch train as one does, through NCCL; one process goes on from their state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import PLACEMENTS, on_processes, results, train_stage

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

STAGES: list[dict[str, Any]] = [
    {"kind": "transfer"},
    {"kind": "lora", "rank": 4},
    {"kind": "logits", "learning_rates": {"new": 1e-3, "all": 1e-3}},
]
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


def _train(folder: Path, stages: list[dict[str, Any]], loop: dict[str, Any], dtype: str) -> None:
    for stage in stages:
        (folder / stage["kind"]).mkdir(parents=True, exist_ok=True)
        train_stage(folder / stage["kind"], stage, loop, device="cuda", dtype=dtype)


def _on_gpus(count: int, placement: str, *arguments: Any) -> None:
    on_processes(count, placement, _train, *arguments, context="spawn")


def _assert_equal(a: Path, b: Path, tolerance: float) -> None:
    (losses, tensors), (others, other_tensors) = results(a), results(b)
    assert others == pytest.approx(losses, rel=tolerance)
    for name, tensor in tensors.items():  # AdamW turns rounding of a small gradient into part of a step
        difference = (other_tensors[name].float() - tensor.float()).norm() / tensor.float().norm().clamp_min(1e-3)
        assert difference < 10 * tolerance, name


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_two_gpus_train_as_one(dtype: str, tmp_path: Path) -> None:
    loop = {"steps": 4, "batch_size": 4}
    _on_gpus(1, "ddp", tmp_path / "one", STAGES, loop, dtype)
    for placement in PLACEMENTS:
        _on_gpus(2, placement, tmp_path / placement, STAGES, loop, dtype)
        for stage in STAGES:
            _assert_equal(tmp_path / "one" / stage["kind"], tmp_path / placement / stage["kind"], TOLERANCE[dtype])


def test_a_state_of_two_gpus_is_resumed_by_one(tmp_path: Path) -> None:
    stages, loop = STAGES[1:], {"steps": 4, "save_every": 2, "schedule": "constant"}
    _on_gpus(1, "ddp", tmp_path / "whole", stages, loop, "float32")
    for placement in PLACEMENTS:
        _on_gpus(2, placement, tmp_path / placement, stages, {**loop, "steps": 2}, "float32")
        _on_gpus(1, placement, tmp_path / placement, stages, loop, "float32")
        for stage in stages:
            _assert_equal(tmp_path / "whole" / stage["kind"], tmp_path / placement / stage["kind"], 1e-3)
