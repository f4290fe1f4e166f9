"""Runs `interpreted.py` in a process of its own: Triton must be imported with its interpreter already on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("interpreted.py")


def test_triton_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-n0", "-x", "--import-mode=importlib", str(SUITE)]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
    assert " passed" in outcome.stdout, outcome.stdout


def test_without_the_interpreter_the_cpu_is_refused():
    code = (
        "import torch; from linearize.kernels.linear_attention import linear_attention\n"
        "x = torch.zeros(1, 2, 1, 16)\n"
        "try: linear_attention(x, x, x, backend='triton')\n"
        "except RuntimeError as error: print(error)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    outcome = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "TRITON_INTERPRET=1" in outcome.stdout or "triton is not installed" in outcome.stdout, (
        outcome.stderr
    )
