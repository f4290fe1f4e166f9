"""Kernels fit GPUs with less shared memory than the one whose launches the tables hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import OutOfResources

from linearize.kernels import fitting

SMALL = 101_376
"""Bytes of shared memory a block can have on compute capability 8.6 and 8.9 (RTX 30 and 40, A10, L4, L40)."""


class Kernel:
    """Needs `stage` bytes per pipeline stage of a GPU that has 100."""

    __name__ = "_kernel"

    def __init__(self, stage: int, resource: str = "shared memory") -> None:
        self.stage, self.resource, self.tried = stage, resource, []  # type: ignore[var-annotated]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*_: Any, num_stages: int, **__: Any) -> None:
            self.tried.append(num_stages)
            if num_stages * self.stage > 100:
                raise OutOfResources(num_stages * self.stage, 100, self.resource)

        return run


def test_the_longest_pipeline_that_fits_is_found_once() -> None:
    kernel, x = Kernel(40), torch.zeros(1)
    for _ in range(2):
        fitting.launch(kernel, (1,), x, BLOCK=64, num_stages=4)
    assert kernel.tried == [4, 3, 2, 2]
    fitting.launch(kernel, (1,), x, BLOCK=32, num_stages=3)  # another launch: not known
    assert kernel.tried[4:] == [3, 2]


def test_what_does_not_fit_at_all_says_so() -> None:
    for kernel in (Kernel(101), Kernel(60, "threads")):
        with pytest.raises(RuntimeError, match=f"_kernel needs 1[02].* of {kernel.resource}.* has 100"):
            fitting.launch(kernel, (1,), torch.zeros(1), num_stages=2)


@pytest.mark.parametrize(
    ("case", "width"),
    [("linear_attention", 128), ("delta_rule", 128), ("window_attention", 256), ("rat_attention", 256)],
)
def test_kernels_compile_for_a_small_gpu_and_fit(case: str, width: int) -> None:
    """In bfloat16, both ways; nothing runs."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.kernels.gpu_stand_in", "89", str(SMALL), case, str(width)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    launches = json.loads(done.stdout.splitlines()[-1])
    assert len(launches) >= 3 and all(shared <= SMALL for _, shared, _ in launches), launches
