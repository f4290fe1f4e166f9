"""Kernel benchmarks on one GPU: ours, torch's attention and, where installed, fla, in the same run.

    python -m linearize.kernels.bench [linear] [delta] [scan] [rat] [decode] [loss] [gates] [windows] [--out FILE]

`kernel_rows()` returns one `Row` per implementation and shape; `table()` prints them. Beside each time stands its
bound: the bytes an ideal kernel moves over the measured copy bandwidth, or the operations over the measured matrix
rate, whichever is longer.
"""

from __future__ import annotations

from linearize.kernels.bench.linear import SHAPES, STEP_SHAPES, draw, linear_attention_rows, softmax_row, step_rows
from linearize.kernels.bench.run import FAMILIES, NeedsGpuError, kernel_rows, store
from linearize.kernels.bench.table import Row, table
from linearize.kernels.bench.timing import (
    DEVICE,
    Machine,
    forward_and_both,
    measure_machine,
    time_graph_ms,
    time_ms,
    time_steps,
)

__all__ = [
    "DEVICE",
    "FAMILIES",
    "SHAPES",
    "STEP_SHAPES",
    "Machine",
    "NeedsGpuError",
    "Row",
    "draw",
    "forward_and_both",
    "kernel_rows",
    "linear_attention_rows",
    "measure_machine",
    "softmax_row",
    "step_rows",
    "store",
    "table",
    "time_graph_ms",
    "time_ms",
    "time_steps",
]
