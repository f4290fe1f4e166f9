"""Benchmark rows of the fused norm and gate, beside plain torch.

python -m linearize.kernels.norm_gate.bench
"""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels import bench
from linearize.kernels.norm_gate import Order, norm_gate

SHAPES: list[tuple[tuple[int, ...], Order]] = [
    ((4, 8192, 32, 128), "norm_then_gate"),
    ((4, 8192, 4096), "gate_then_norm"),
]


def rows(machine: bench.Machine, repeats: int = 20) -> list[bench.Row]:
    """x, gate and y move once forward; x, gate, dy, dx and dgate once backward."""
    found = []
    for shape, order in SHAPES:
        x, gate = (torch.randn(shape, device=bench.DEVICE, dtype=torch.bfloat16) for _ in range(2))
        weight = torch.ones(shape[2:], device=bench.DEVICE)
        for name, backend in (("linearize", "auto"), ("torch", "chunked")):

            def run(x: Tensor, weight: Tensor, gate: Tensor, order: Order = order, backend: str = backend) -> Tensor:
                return norm_gate(x, weight, gate, order=order, backend=backend)

            row = bench.Row(order.replace("_", " "), "x".join(map(str, shape)), name)
            row.forward_bound_ms, row.both_bound_ms = (machine.bound_ms(n * x.nbytes, 0) for n in (3, 8))
            times = bench.forward_and_both(run, [x, weight, gate], repeats)
            row.forward_ms, row.both_ms, row.first_call_s, row.host_ms = times
            found.append(row)
    return found


if __name__ == "__main__":
    print(bench.table(rows(bench.measure_machine())))
