"""Benchmark rows of the short convolution, beside torch's depthwise convolution in the same run.

python -m linearize.kernels.short_conv.bench
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.kernels import bench
from linearize.kernels.short_conv import short_conv, short_conv_step

SHAPES = [(4, 8192, 4096, 4), (8, 4096, 2048, 4)]
STEP_SHAPES = [(256, 4096, 4), (1, 4096, 4)]


def _torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    z = F.conv1d(x.mT, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[2])
    return F.silu(z[..., : x.shape[1]]).mT


def pass_rows(machine: bench.Machine, repeats: int = 20) -> list[bench.Row]:
    """Forward and backward with bias and SiLU: x and y are moved once forward, x, dy and dx backward."""
    rows = []
    implementations: dict[str, Callable[..., Tensor]] = {
        "linearize": lambda x, weight, bias: short_conv(x, weight, bias, "silu")[0],
        "torch": _torch,
    }
    for B, T, D, W in SHAPES:
        make: dict[str, Any] = {"device": bench.DEVICE, "dtype": torch.bfloat16}
        inputs = [torch.randn(B, T, D, **make), torch.randn(D, W, **make), torch.randn(D, **make)]
        for name, run in implementations.items():
            row = bench.Row("short convolution, SiLU", f"B{B} T{T} D{D} W{W}", name)
            elements = float(B * T * D)
            row.forward_bound_ms, row.both_bound_ms = (
                machine.bound_ms(4 * elements, 0),
                machine.bound_ms(10 * elements, 0),
            )
            row.forward_ms, row.both_ms, row.first_call_s, row.host_ms = bench.forward_and_both(run, inputs, repeats)
            rows.append(row)
        del inputs
        torch.cuda.empty_cache()
    return rows


def step_rows(machine: bench.Machine) -> list[bench.Row]:
    """One decoding step: the state is read and written once, x and y once."""
    rows = []
    for B, D, W in STEP_SHAPES:
        make: dict[str, Any] = {"device": bench.DEVICE, "dtype": torch.bfloat16}
        token = (torch.randn(B, D, **make), torch.randn(D, W, **make))
        states = [torch.randn(B, W - 1, D, **make) for _ in range(8)]

        def run(token: tuple[Tensor, Tensor] = token, states: list[Tensor] = states) -> None:
            for state in states:
                short_conv_step(*token, state, activation="silu")

        row = bench.Row("short convolution, one step", f"B{B} D{D} W{W}", "linearize")
        row.first_call_s, row.forward_ms = bench.time_steps(run, len(states))
        row.forward_bound_ms = machine.bound_ms(4.0 * B * D * W + 2.0 * D * W, 0)
        rows.append(row)
    return rows


def rows(machine: bench.Machine, repeats: int = 20) -> list[bench.Row]:
    """All of them."""
    return pass_rows(machine, repeats) + step_rows(machine)


if __name__ == "__main__":
    print(bench.table(rows(bench.measure_machine())))
