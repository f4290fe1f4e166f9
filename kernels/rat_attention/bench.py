"""Benchmark rows of RAT with a window, beside torch's causal softmax attention in the same run.

python -m linearize.kernels.rat_attention.bench
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels import bench
from linearize.kernels.rat_attention import rat_window_attention, rat_window_attention_step

WINDOW, CHUNK = 64, 16
# B, T, query heads, kv heads, width
SHAPES = [(4, 8192, 32, 32, 128), (4, 8192, 32, 8, 128)]
# B, tokens seen, query heads, kv heads, width
STEP_SHAPES = [(64, 8192, 32, 8, 128), (1, 32768, 32, 8, 128)]


def work(B: int, T: int, H: int, G: int, D: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """(bytes, operations) an ideal kernel has for the forward pass, and for both passes together."""
    queries, pairs = 2.0 * B * T * H * D, 4.0 * B * (T + T / CHUNK) * G * D
    products = B * H * (T * (WINDOW + CHUNK / 2) + T * T / CHUNK / 2)
    forward = 2 * queries + pairs + 4.0 * B * T * H
    backward = 4 * queries + 2 * pairs + 4.0 * B * T * H
    return (forward, 4 * D * products), (forward + backward, 14 * D * products)


def pass_rows(machine: bench.Machine, repeats: int = 20) -> list[bench.Row]:
    """Ours, and causal softmax attention with as many heads everywhere."""
    rows = []
    for B, T, H, G, D in SHAPES:
        make: dict[str, Any] = {"device": bench.DEVICE, "dtype": torch.bfloat16}
        heads = [(T, H), (T, G), (T, G), (T // CHUNK, G), (T // CHUNK, G)]
        inputs = [torch.randn(B, length, n, D, **make) for length, n in heads]
        offset = torch.zeros(H, device=bench.DEVICE)

        def ours(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, offset: Tensor = offset) -> Tensor:
            return rat_window_attention(q, k, v, keys, values, offset, window=WINDOW, chunk_size=CHUNK)

        row = bench.Row(f"RAT, window {WINDOW}, chunk {CHUNK}", f"B{B} T{T} H{H}/{G} D{D}", "linearize")
        (fb, fo), (bb, bo) = work(B, T, H, G, D)
        row.forward_bound_ms, row.both_bound_ms = machine.bound_ms(fb, fo), machine.bound_ms(bb, bo)
        row.forward_ms, row.both_ms, row.first_call_s, row.host_ms = bench.forward_and_both(ours, inputs, repeats)
        rows.append(row)
        if G == H:
            rows.append(bench.softmax_row(row.shape, inputs[:3], repeats))
        del inputs
        torch.cuda.empty_cache()
    return rows


def step_rows(machine: bench.Machine) -> list[bench.Row]:
    """One decoding step: the ring and the summaries are read once."""
    rows = []
    for B, seen, H, G, D in STEP_SHAPES:
        make: dict[str, Any] = {"device": bench.DEVICE, "dtype": torch.bfloat16}
        q, k, v = (torch.randn(B, n, D, **make) for n in (H, G, G))
        keys, values = (torch.randn(B, seen // CHUNK, G, D, **make) for _ in range(2))
        ring = tuple(torch.randn(B, WINDOW + CHUNK - 1, G, D, **make) for _ in range(2))
        offset = torch.zeros(H, device=bench.DEVICE)
        position = torch.full((B,), seen - 1, dtype=torch.int64, device=bench.DEVICE)
        tensors: Any = (q, k, v, keys, values, offset, ring, position)

        def run(tensors: Any = tensors) -> Tensor:
            return rat_window_attention_step(*tensors, window=WINDOW, chunk_size=CHUNK)

        row = bench.Row("RAT with a window, one step", f"B{B} after {seen} H{H}/{G} D{D}", "linearize")
        row.first_call_s, row.forward_ms = bench.time_steps(run)
        row.forward_bound_ms = machine.bound_ms(2.0 * (keys.nbytes + ring[0].nbytes), 0)
        rows.append(row)
    return rows


def rows(machine: bench.Machine, repeats: int = 20) -> list[bench.Row]:
    """All of them."""
    return pass_rows(machine, repeats) + step_rows(machine)


if __name__ == "__main__":
    print(bench.table(rows(bench.measure_machine())))
