"""Benchmark rows of gate preparation, beside plain torch.

python -m linearize.kernels.gate_prep.bench
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from linearize.kernels import bench
from linearize.kernels.gate_prep import ddts_gates, softplus_gate

SHAPES = [(4, 8192, 32, 128)]  # B, T, H, K


def rows(machine: bench.Machine, repeats: int = 20) -> list[bench.Row]:
    """Both gates, one number per channel; the bounds count what must be read and written once."""
    found = []
    for B, T, H, K in SHAPES:
        a, b, k = (torch.randn(B, T, H, K, device=bench.DEVICE, dtype=torch.bfloat16) for _ in range(3))
        A_log, bias = (torch.randn(H, K, device=bench.DEVICE) for _ in range(2))
        # Bytes per element, forward and both passes. The inputs (16 bits), the log decay and the step (float32) and the
        # key (16 bits) move once each way, and the inputs once more backward.
        cases: list[tuple[str, float, float, list[Tensor], Callable[..., tuple[Tensor, Tensor]]]] = [
            ("DDTS gates", 12.0, 30.0, [a, b, k], ddts_gates),
            ("DDTS gates, SiLU", 12.0, 30.0, [a, b, k], functools.partial(ddts_gates, activation="silu")),
            ("softplus gate", 10.0, 22.0, [a, A_log, bias], softplus_gate),
        ]
        for operation, forward, both, inputs, gate in cases:
            for name, backend in (("linearize", "auto"), ("torch", "chunked")):
                row = bench.Row(operation, f"B{B} T{T} H{H} K{K}", name)
                row.forward_bound_ms = machine.bound_ms(forward * k.numel(), 0)
                row.both_bound_ms = machine.bound_ms(both * k.numel(), 0)
                _measure(row, functools.partial(gate, backend=backend), inputs, repeats)
                found.append(row)
    return found


def _measure(row: bench.Row, gate: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], repeats: int) -> None:
    """Both outputs take part in the backward pass."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    gradients = [torch.randn_like(output) for output in gate(*inputs)]
    row.forward_ms = bench.time_ms(lambda: gate(*inputs), repeats)
    row.both_ms = bench.time_ms(lambda: torch.autograd.grad(gate(*leaves), leaves, gradients), repeats)


if __name__ == "__main__":
    print(bench.table(rows(bench.measure_machine())))
