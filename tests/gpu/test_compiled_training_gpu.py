"""`compile: true` on a GPU: real kernels inside graphs of torch.compile learn what the same step learns without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.processes import train_stage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["transfer", "lora"])
@pytest.mark.parametrize("to", ["rodimus", "gated-deltanet"])
def test_compiled_training_is_the_plain_one(to: str, kind: str, dtype: str, tmp_path: Path) -> None:
    losses = []
    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        folder.mkdir()
        loop = {"steps": 4, "batch_size": 4, "compile": compiled}
        train_stage(folder, {"kind": kind, "rank": 4}, loop, to=to, family="llama", device="cuda", dtype=dtype)
        losses.append(json.loads((folder / "losses.json").read_text()))
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE[dtype])
    assert losses[0][-1] != losses[0][0]
