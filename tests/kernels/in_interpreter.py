"""Tests of Triton kernels on the CPU: Triton must be imported with its interpreter already on, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")
starts_it = pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")


def run_interpreted(file: str) -> None:
    """Run a file's tests in the interpreter; they must pass."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-n0", "-x", "--import-mode=importlib", str(Path(file))]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
    assert " passed" in outcome.stdout, outcome.stdout
