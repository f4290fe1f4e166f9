"""Benchmark rows of the window beside linear attention, with softmax attention and the plain torch form.

python -m linearize.kernels.window_linear_attention.bench
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linearize.kernels import bench
from linearize.kernels.window_linear_attention import window_linear_attention, window_linear_attention_step

SHAPES = [
    # B, T, query heads, key heads, width, features, window
    (4, 8192, 32, 32, 128, 256, 64),
    (4, 8192, 32, 8, 64, 128, 64),
]
STEP_SHAPES = [(64, 32, 8, 128, 256, 64), (1, 32, 8, 128, 256, 64)]


def work(B: int, T: int, H: int, Hk: int, D: int, F: int, window: int) -> tuple[tuple[float, float], ...]:
    """(bytes, operations) an ideal kernel has for the forward pass, and for both passes together."""
    tokens, chunk = float(B * T * H), 64
    inputs = 2 * tokens * (D + 2 * F) + 4.0 * B * T * Hk * D
    operations = tokens * (4 * window * D + 2 * chunk * (F + D) + 4 * F * D)
    forward = inputs + 2 * tokens * D
    return (forward, operations), (forward + 2 * inputs + 4 * tokens * D, 3.5 * operations)


def draw(B: int, T: int, H: int, Hk: int, D: int, F: int) -> list[Tensor]:
    """q, k, v and features in bfloat16, mix in float32."""
    make: dict[str, Any] = {"device": bench.DEVICE, "dtype": torch.bfloat16}
    inputs = [torch.randn(B, T, heads, D, **make) for heads in (H, Hk, Hk)]
    inputs += [torch.randn(B, T, H, F, **make).softmax(-1) for _ in range(2)]
    return [*inputs, torch.full((H,), -1.0, device=bench.DEVICE)]


def pass_rows(machine: bench.Machine, repeats: int = 20) -> list[bench.Row]:
    """Ours and the same in plain torch."""
    rows = []
    for B, T, H, Hk, D, F, window in SHAPES:
        inputs = draw(B, T, H, Hk, D, F)
        for name, backend in (("linearize", "triton"), ("torch", "chunked")):

            def run(*x: Tensor, backend: str = backend, window: int = window) -> Tensor:
                return window_linear_attention(*x, window=window, backend=backend)[0]

            row = bench.Row(f"window {window} + linear", f"B{B} T{T} H{H}/{Hk} D{D} F{F}", name)
            (fb, fo), (bb, bo) = work(B, T, H, Hk, D, F, window)
            row.forward_bound_ms, row.both_bound_ms = machine.bound_ms(fb, fo), machine.bound_ms(bb, bo)
            try:
                times = bench.forward_and_both(run, inputs, repeats if backend == "triton" else min(repeats, 3))
                row.forward_ms, row.both_ms, row.first_call_s, row.host_ms = times
            except torch.OutOfMemoryError:  # plain torch keeps everything in float32
                row.note = "out of memory"
            rows.append(row)
            torch.cuda.empty_cache()
        del inputs
    return rows


def step_rows(machine: bench.Machine) -> list[bench.Row]:
    """One decoding step: the sums are read and written once, the ring is read once."""
    rows = []
    for B, H, Hk, D, F, window in STEP_SHAPES:
        q, k, v, phi_q, phi_k, mix = draw(B, 1, H, Hk, D, F)
        token = [x[:, 0] for x in (q, k, v, phi_q, phi_k)]
        states = [
            [torch.randn(B, window + 1, Hk, D, device=bench.DEVICE, dtype=torch.bfloat16) for _ in range(2)]
            + [torch.full((B,), 5000, dtype=torch.int64, device=bench.DEVICE)]
            + [torch.rand(B, H, F, D, device=bench.DEVICE), torch.rand(B, H, F, device=bench.DEVICE)]
            for _ in range(max(1, min(8, (1 << 28) // (4 * B * H * F * D))))
        ]

        step: Callable[..., Tensor] = functools.partial(window_linear_attention_step, window=window)

        def run(
            step: Callable[..., Tensor] = step,
            token: list[Tensor] = token,
            mix: Tensor = mix,
            states: list[list[Tensor]] = states,
        ) -> None:
            for state in states:
                step(*token, mix, *state)

        row = bench.Row(f"window {window} + linear, one step", f"B{B} H{H}/{Hk} D{D} F{F}", "linearize")
        row.first_call_s, row.forward_ms = bench.time_steps(run, len(states))
        row.forward_bound_ms = machine.bound_ms(8.0 * B * H * F * (D + 1) + 4.0 * B * window * Hk * D, 0)
        rows.append(row)
    return rows


def rows(machine: bench.Machine, repeats: int = 20) -> list[bench.Row]:
    """All of them."""
    return pass_rows(machine, repeats) + step_rows(machine)


if __name__ == "__main__":
    print(bench.table(rows(bench.measure_machine())))
