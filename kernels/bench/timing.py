"""Times of GPU work: medians of CUDA-event timings, GPU time alone, and what the machine can do at most."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DEVICE = "cuda"


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


def time_steps(run: Callable[[], object], count: int = 1) -> tuple[float, float]:
    """(seconds to the first result, ms of one step inside a CUDA graph) of `run()`, which takes `count` steps."""
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    return first, time_graph_ms(run) / count
