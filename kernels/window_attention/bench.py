"""Benchmark rows of window attention, beside torch's causal softmax attention in the same run.

python -m linearize.kernels.window_attention.bench
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels import bench
from linearize.kernels.window_attention import window_attention, window_attention_step

SHAPES = [
    # B, T, query heads, key heads, value heads, width, windows
    (4, 8192, 32, 32, 32, 128, (64, 1024)),
    (4, 8192, 32, 8, 8, 128, (64, 1024)),
    (4, 8192, 32, 1, 32, 128, (64, 1024)),
]
STEP_SHAPES = [(256, 32, 8, 128, 64), (1, 32, 8, 128, 64), (64, 32, 8, 128, 1024)]


def work(B: int, T: int, H: int, Hk: int, Hv: int, D: int, window: int) -> tuple[tuple[float, float], ...]:
    """(bytes, operations) an ideal kernel has for the forward pass, and for both passes together."""
    queries, keys = 2.0 * B * T * H * D, 2.0 * B * T * (Hk + Hv) * D
    pairs = B * H * (window * T - window * (window - 1) / 2)
    forward = 2 * queries + keys + 4.0 * B * T * H
    # Backward: q, o, do and the log-sum-exp are read, dq is written; keys and values are read, their gradients written.
    backward = 4 * queries + 2 * keys + 4.0 * B * T * H
    return (forward, 4 * D * pairs), (forward + backward, 14 * D * pairs)


def pass_rows(machine: bench.Machine, repeats: int = 20) -> list[bench.Row]:
    """Ours at each shape and window, and causal softmax attention once per shape with as many heads everywhere."""
    rows = []
    for B, T, H, Hk, Hv, D, windows in SHAPES:
        make: dict[str, Any] = {"device": bench.DEVICE, "dtype": torch.bfloat16}
        inputs = [torch.randn(B, T, heads, D, **make) for heads in (H, Hk, Hv)]
        shape = f"B{B} T{T} H{H}/{Hk}/{Hv} D{D}"
        for window in windows:

            def run(q: Tensor, k: Tensor, v: Tensor, window: int = window) -> Tensor:
                o = window_attention(q, k, v, window=window)
                assert isinstance(o, Tensor)
                return o

            row = bench.Row(f"window attention, W {window}", shape, "linearize")
            (fb, fo), (bb, bo) = work(B, T, H, Hk, Hv, D, window)
            row.forward_bound_ms, row.both_bound_ms = machine.bound_ms(fb, fo), machine.bound_ms(bb, bo)
            row.forward_ms, row.both_ms, row.first_call_s, row.host_ms = bench.forward_and_both(run, inputs, repeats)
            rows.append(row)
        if Hk == Hv == H:
            rows.append(bench.softmax_row(shape, inputs, repeats))
        del inputs
        torch.cuda.empty_cache()
    return rows


def step_rows(machine: bench.Machine) -> list[bench.Row]:
    """One decoding step from a full ring, which is read once."""
    rows = []
    for B, H, heads, D, window in STEP_SHAPES:
        make: dict[str, Any] = {"device": bench.DEVICE, "dtype": torch.bfloat16}
        q, k, v = (torch.randn(B, n, D, **make) for n in (H, heads, heads))
        cache = 4 * B * window * heads * D
        # Several caches in turn, or a small one would stay in the L2 cache.
        rings = [
            [torch.randn(B, window, heads, D, **make) for _ in range(2)]
            + [torch.full((B,), 5000, dtype=torch.int64, device=bench.DEVICE)]
            for _ in range(max(1, min(8, (1 << 28) // cache)))
        ]

        def run(
            q: Tensor = q, k: Tensor = k, v: Tensor = v, rings: list[list[Tensor]] = rings, window: int = window
        ) -> None:
            for keys, values, position in rings:
                window_attention_step(q, k, v, keys, values, position, window=window)

        row = bench.Row("window attention, one step", f"B{B} H{H}/{heads} D{D} W{window}", "linearize")
        row.first_call_s, row.forward_ms = bench.time_steps(run, len(rings))
        row.forward_bound_ms = machine.bound_ms(cache + 4.0 * B * H * D, 0)
        rows.append(row)
    return rows


def rows(machine: bench.Machine, repeats: int = 20) -> list[bench.Row]:
    """All of them."""
    return pass_rows(machine, repeats) + step_rows(machine)


if __name__ == "__main__":
    print(bench.table(rows(bench.measure_machine())))
