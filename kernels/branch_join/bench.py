"""Benchmark rows of the join, beside plain torch.

python -m linearize.kernels.branch_join.bench
"""

from __future__ import annotations

import functools

import torch

from linearize.kernels import bench
from linearize.kernels.branch_join import branch_join

SHAPES = [(8, 4096, 32, 64), (4, 8192, 32, 128)]  # B, T, H, V


def rows(machine: bench.Machine, repeats: int = 20) -> list[bench.Row]:
    """y, window and output move once forward; those, the output's gradient and two gradients backward."""
    found = []
    for B, T, H, V in SHAPES:
        y, window = (torch.randn(B, T, H, V, device=bench.DEVICE, dtype=torch.bfloat16) for _ in range(2))
        scale, part = (torch.randn(H, V, device=bench.DEVICE) for _ in range(2))
        inputs = [y, window, torch.randn(B, T, H, device=bench.DEVICE), scale, part]
        for name, backend in (("linearize", "auto"), ("torch", "chunked")):
            row = bench.Row("recurrence joins window", f"B{B} T{T} H{H} V{V}", name)
            row.forward_bound_ms = machine.bound_ms(6.0 * y.numel(), 0)
            row.both_bound_ms = machine.bound_ms(16.0 * y.numel(), 0)
            run = functools.partial(branch_join, backend=backend)
            row.forward_ms, row.both_ms, row.first_call_s, row.host_ms = bench.forward_and_both(run, inputs, repeats)
            found.append(row)
    return found


if __name__ == "__main__":
    print(bench.table(rows(bench.measure_machine())))
