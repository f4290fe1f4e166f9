"""The kernel benchmarks as far as a machine without a GPU can tell: names, the table, the file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from linearize.kernels import bench


def test_unknown_families_are_named():
    with pytest.raises(ValueError, match=r"'ratt'.*linear, delta, scan, rat, decode"):
        bench.kernel_rows(["linear", "ratt"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_one_line_and_exit_code_2():
    outcome = subprocess.run([sys.executable, "-m", "linearize.kernels.bench", "rat"], capture_output=True, text=True)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert outcome.stderr.count("\n") == 1
    assert "CUDA GPU" in outcome.stderr


def test_rows_are_printed_and_stored(tmp_path):
    rows = [
        bench.Row("machine", "a GPU", "torch", note="copy 4000 GB/s"),
        bench.Row("RAT layer", "B2", "linearize", forward_ms=2.0, both_ms=8.0, forward_bound_ms=1.0, both_bound_ms=6.0),
    ]
    text = bench.table(rows).splitlines()
    assert "copy 4000 GB/s" in text[1]
    assert [word for word in text[2].split() if word.endswith("%")] == ["50%", "75%"]
    bench.store(rows, tmp_path / "rows.json")
    stored = json.loads((tmp_path / "rows.json").read_text())
    assert [bench.Row(**row) for row in stored] == rows
