"""Kernel benchmarks on one GPU: ours, torch's attention and, where installed, fla, in the same run.

`kernel_rows()` returns one `Row` per implementation and shape; `table()` prints them. Times are medians of
CUDA-event timings, GPU time alone. Beside each time stands its bound: the bytes an ideal kernel moves over the measured copy
bandwidth, or the operations over the measured matrix rate, whichever is longer.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from linearize.kernels.linear_attention import linear_attention, linear_attention_step

DEVICE = "cuda"


@dataclasses.dataclass
class Row:
    """One measurement; times in milliseconds, None where it was not taken.

    host_ms is what the host takes to launch the forward pass: short passes can't repeat faster than that outside a
    CUDA graph.
    """

    operation: str
    shape: str
    implementation: str
    forward_ms: float | None = None
    both_ms: float | None = None
    forward_bound_ms: float | None = None
    both_bound_ms: float | None = None
    first_call_s: float | None = None
    host_ms: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the GPU can do at most: bytes/s (read plus written) and bfloat16 operations/s, both measured."""

    name: str
    bandwidth: float
    matrix_rate: float

    def bound_ms(self, bytes_moved: float, operations: float) -> float:
        return 1e3 * max(bytes_moved / self.bandwidth, operations / self.matrix_rate)


def time_ms(run: Callable[[], object], repeats: int = 20, warmup: int = 3) -> float:
    """Median GPU time of `run`; the GPU sleeps first, so that launches by the host are not what is timed."""
    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000 * max(1, repeats // 20))
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True))


def time_graph_ms(run: Callable[[], object], inner: int = 20, repeats: int = 10) -> float:
    """Median GPU time of one `run` inside a replayed CUDA graph: no launch gaps from the host."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            run()
    return time_ms(graph.replay, repeats) / inner


def measure_machine() -> Machine:
    """Copy bandwidth and bfloat16 matrix rate of the GPU, on random data."""
    x = torch.randn(1 << 30, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    bandwidth = 2 * x.nbytes / (1e-3 * time_ms(lambda: y.copy_(x)))
    n = 8192
    a = x[: n * n].view(n, n)
    b = x[n * n : 2 * n * n].view(n, n)
    out = y[: n * n].view(n, n)
    rate = 2 * n**3 / (1e-3 * time_ms(lambda: torch.mm(a, b, out=out)))
    return Machine(torch.cuda.get_device_name(), bandwidth, rate)


def forward_and_both(
    run: Callable[..., Tensor], inputs: Sequence[Tensor], repeats: int = 20
) -> tuple[float, float, float, float]:
    """(forward ms, forward plus backward ms, seconds to the first result, host ms) of `run(*inputs)`."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.cuda.synchronize()
    began = time.perf_counter()
    o = run(*leaves)
    do = torch.randn_like(o)
    torch.autograd.grad(o, leaves, do)
    torch.cuda.synchronize()
    first = time.perf_counter() - began

    def forward() -> None:
        with torch.no_grad():
            run(*inputs)

    def both() -> None:
        torch.autograd.grad(run(*leaves), leaves, do)

    times = time_ms(forward, repeats), time_ms(both, repeats)
    torch.cuda._sleep(50_000_000)
    began = time.perf_counter()
    for _ in range(10):
        forward()
    host = (time.perf_counter() - began) * 100
    torch.cuda.synchronize()
    return *times, first, host


SHAPES = [
    # B, T, H, K, V, decays
    (4, 8192, 32, 128, 128, ("none", "scalar", "vector")),
    (8, 4096, 1, 64, 4096, ("vector",)),
    (1, 32768, 1, 64, 4096, ("vector",)),
]
STEP_SHAPES = [(256, 32, 128, 128), (1, 32, 128, 128), (256, 1, 64, 4096), (1, 1, 64, 4096)]


def draw(B: int, T: int, H: int, K: int, V: int, decay: str) -> list[Tensor]:
    """q, k, v in bfloat16 and a float32 log decay as a trained model has it (half-lives of some tens of "
    "tokens)."""
    make: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    inputs = [
        torch.randn(B, T, H, K, **make),
        torch.randn(B, T, H, K, **make),
        torch.randn(B, T, H, V, **make),
    ]
    if decay == "scalar":
        inputs.append(torch.nn.functional.logsigmoid(torch.randn(B, T, H, device=DEVICE) + 3) / 2)
    if decay == "vector":
        inputs.append(torch.nn.functional.logsigmoid(torch.randn(B, T, H, K, device=DEVICE) + 3) / 2)
    return inputs


def linear_attention_work(B: int, T: int, H: int, K: int, V: int, decay: str) -> tuple[tuple[float, float], ...]:
    """(bytes, operations) an ideal kernel has for the forward pass, and for both passes together."""
    tokens, chunk = B * T * H, 64
    g = {"none": 0, "scalar": 4, "vector": 4 * K}[decay]
    read = tokens * (2 * (2 * K + V) + g)
    write = tokens * 2 * V
    operations = tokens * (2 * chunk * (K + V) + 4 * K * V)
    backward_bytes = read + write + tokens * (2 * (2 * K + V) + g)
    return (read + write, operations), (read + write + backward_bytes, 3.5 * operations)


def linear_attention_rows(machine: Machine, shapes: Iterable[tuple] = tuple(SHAPES), repeats: int = 20) -> list[Row]:
    """Ours, fla and softmax attention at each shape."""
    rows = []
    for B, T, H, K, V, decays in shapes:
        shape = f"B{B} T{T} H{H} K{K} V{V}"
        for decay in decays:
            inputs = draw(B, T, H, K, V, decay)
            (fb, fo), (bb, bo) = linear_attention_work(B, T, H, K, V, decay)
            operation = f"linear attention, {decay} decay"
            for name, run in _implementations(decay).items():
                row = Row(operation, shape, name)
                row.forward_bound_ms, row.both_bound_ms = machine.bound_ms(fb, fo), machine.bound_ms(bb, bo)
                try:
                    row.forward_ms, row.both_ms, row.first_call_s, row.host_ms = forward_and_both(run, inputs, repeats)
                except Exception as error:  # a peer that can't run must not end the benchmark
                    row.note = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                rows.append(row)
            del inputs
        if K == V:
            rows.append(_softmax_row(shape, draw(B, T, H, K, V, "none"), repeats))
        torch.cuda.empty_cache()
    return rows


def _implementations(decay: str) -> dict[str, Callable[..., Tensor]]:
    result: dict[str, Callable[..., Tensor]] = {"linearize": lambda *x: linear_attention(*x)[0]}
    try:
        from fla.ops.gla import chunk_gla
        from fla.ops.linear_attn import chunk_linear_attn
        from fla.ops.simple_gla import chunk_simple_gla
    except Exception:  # not installed, or not importable here
        return result
    peers: dict[str, Callable[..., Tensor]] = {
        "none": lambda q, k, v: chunk_linear_attn(q, k, v, normalize=False)[0],
        "scalar": lambda q, k, v, g: chunk_simple_gla(q, k, v, g)[0],
        "vector": lambda q, k, v, g: chunk_gla(q, k, v, g)[0],
    }
    return {**result, "fla": peers[decay]}


def _softmax_row(shape: str, inputs: list[Tensor], repeats: int) -> Row:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    row = Row("softmax attention, causal", shape, "torch SDPA")
    row.forward_ms, row.both_ms, row.first_call_s, row.host_ms = forward_and_both(run, inputs, min(repeats, 5))
    return row


def step_rows(machine: Machine, shapes: Iterable[tuple[int, int, int, int]] = tuple(STEP_SHAPES)) -> list[Row]:
    """One decoding step with a decay per channel; the state is read and written once."""
    rows = []
    for B, H, K, V in shapes:
        q, k, v, g = (x[:, 0] for x in draw(B, 1, H, K, V, "vector"))
        # Several states in turn, or a small one would stay in the cache.
        states = [
            torch.randn(B, H, K, V, device=DEVICE) for _ in range(max(1, min(8, (1 << 28) // (4 * B * H * K * V))))
        ]

        def run(states: list[Tensor] = states, q: Tensor = q, k: Tensor = k, v: Tensor = v, g: Tensor = g) -> None:
            for state in states:
                linear_attention_step(q, k, v, state, g)

        row = Row("linear attention, one step", f"B{B} H{H} K{K} V{V}", "linearize")
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        row.first_call_s = time.perf_counter() - began
        row.forward_ms = time_graph_ms(run) / len(states)
        row.forward_bound_ms = machine.bound_ms(8.0 * B * H * K * V, 0)
        rows.append(row)
    return rows


def kernel_rows(repeats: int = 20) -> list[Row]:
    """Every kernel benchmark; needs a CUDA device."""
    if not torch.cuda.is_available():
        raise RuntimeError("kernel benchmarks need a CUDA device, and torch sees none")
    machine = measure_machine()
    note = f"copy {machine.bandwidth / 1e9:.0f} GB/s, bf16 matmul {machine.matrix_rate / 1e12:.0f} TF/s"
    rows = [Row("machine", machine.name, f"torch {torch.__version__}", note=note)]
    return rows + linear_attention_rows(machine, repeats=repeats) + step_rows(machine)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, with the fraction of the bound that was reached."""
    lines = [
        f"{'operation':32} {'shape':26} {'by':11} {'fwd ms':>8} {'bound':>6} {'both ms':>8} {'bound':>6} "
        f"{'first s':>8} {'host ms':>8}"
    ]
    for row in rows:
        reached = [
            f"{time:8.4f} {100 * bound / time:5.0f}%" if time and bound else f"{time:8.3f}       " if time else " " * 15
            for time, bound in ((row.forward_ms, row.forward_bound_ms), (row.both_ms, row.both_bound_ms))
        ]
        first = f"{row.first_call_s:8.1f}" if row.first_call_s is not None else " " * 8
        host = f"{row.host_ms:8.3f}" if row.host_ms is not None else " " * 8
        lines.append(
            f"{row.operation:32} {row.shape:26} {row.implementation:11} {' '.join(reached)} {first} {host}  {row.note}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(kernel_rows()))
