"""The gated scan: bound by memory bandwidth in both directions."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.bench.table import Row
from linearize.kernels.bench.timing import DEVICE, Machine, forward_and_both
from linearize.kernels.gated_scan import gated_scan

SHAPES = [
    # B, T, channels, chunk size
    (8, 4096, (16, 128), 16),
    (8, 4096, (4096,), None),
    (1, 32768, (4096,), None),
]


def scan_rows(machine: Machine, repeats: int = 20) -> list[Row]:
    """x and gate in bfloat16: 3 tensors moved forward, 6 more backward."""
    rows = []
    for B, T, inner, chunk in SHAPES:
        x = torch.randn(B, T, *inner, device=DEVICE, dtype=torch.bfloat16)
        gate = torch.sigmoid(torch.randn_like(x) + 2)

        def run(x: Tensor, gate: Tensor, chunk: int | None = chunk) -> Tensor:
            return gated_scan(x, gate, chunk)[0]

        shape = f"B{B} T{T} D{'x'.join(map(str, inner))}"
        row = Row(f"gated scan, chunk {chunk or 'T'}", shape, "linearize")
        row.forward_bound_ms, row.both_bound_ms = (machine.bound_ms(n * x.nbytes, 0) for n in (3, 9))
        row.forward_ms, row.both_ms, row.first_call_s, row.host_ms = forward_and_both(run, [x, gate], repeats)
        rows.append(row)
    return rows
