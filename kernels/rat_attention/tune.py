"""Find launch configurations for RAT attention on this GPU: each candidate is checked, then timed.

    python -m linearize.kernels.rat_attention.tune [KERNEL ...] [--seconds N]

Kernels: those of `launch.TABLE`, and "summaries" (who attends, by their number). Prints a line per candidate and last
the best of each, to be written into `launch.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from linearize.kernels import bench
from linearize.kernels.bench import rat as layer
from linearize.kernels.rat_attention import launch, rat_attention, rat_attention_step, triton_path
from linearize.kernels.rat_attention.launch import Launch

HEADS = (layer.GROUPS, layer.GROUPS, layer.H, layer.H)
CANDIDATES: dict[str, list[Launch]] = {
    "own": [Launch(rows, 1, warps, 1) for rows, warps in ((512, 2), (512, 4), (1024, 4), (2048, 4))],
    "own back": [Launch(rows, 1, warps, 1) for rows, warps in ((256, 2), (512, 4), (512, 8), (1024, 4))],
    "attend": [Launch(128, 64, 8, 2), Launch(128, 64, 8, 3), Launch(128, 128, 8, 2), Launch(64, 64, 4, 3)],
    "queries": [Launch(64, 64, 4, 2), Launch(128, 64, 8, 2), Launch(64, 64, 4, 3)],
    "chunks": [Launch(64, 64, 4, 2), Launch(64, 64, 8, 2), Launch(64, 128, 8, 2), Launch(64, 64, 4, 3)],
    "step": [Launch(rows, 1, warps, 1) for rows, warps in ((16, 2), (16, 4), (32, 4), (64, 4), (64, 8))],
}


def draw(B: int, T: int) -> list[Tensor]:
    return [torch.randn(B, T, heads, layer.K, device=bench.DEVICE, dtype=torch.bfloat16) for heads in HEADS]


def attend(inputs: list[Tensor], turns: layer.Tables, backend: str = "triton") -> Tensor:
    q, k, v, gate = inputs
    return rat_attention(
        q, k, v, gate, chunk_size=layer.C, position_embeddings=turns, sigmoid_gate=True, backend=backend
    )


def check() -> float:
    """Worst relative error of the output and the gradients against float64."""
    x, turns = draw(1, 1000), layer.tables(64)
    do = torch.randn(1, 1000, layer.H, layer.K, device=bench.DEVICE, dtype=torch.bfloat16)
    results = []
    for double, backend in ((False, "triton"), (True, "chunked")):
        leaves = [(t.double() if double else t).detach().requires_grad_() for t in x]
        o = attend(leaves, turns, backend)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype))])
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(*results, strict=True))


def kernel_of(name: str) -> Iterator[tuple[str, Callable[[], float], Callable[[], float]]]:
    """(configuration, its error, its time in ms) of every candidate of one kernel."""
    if name == "step":
        yield from _steps()
        return
    products = name in ("attend", "queries", "chunks")
    B, T = (8, 16384) if products else (32, 4096)
    x, turns = [t.requires_grad_() for t in draw(B, T)], layer.tables(T // layer.C)
    do = torch.randn(B, T, layer.H, layer.K, device=bench.DEVICE, dtype=torch.bfloat16)

    def both() -> None:
        torch.autograd.grad(attend(x, turns), x, do)

    for pick in CANDIDATES[name]:

        def measure(pick: Launch = pick) -> float:
            with mock.patch.dict(launch.TABLE, {name: pick}):
                return bench.time_ms(both, repeats=4, warmup=1)

        def error(pick: Launch = pick) -> float:
            with mock.patch.dict(launch.TABLE, {name: pick}):
                return check()

        yield str(pick), error, measure


def _steps() -> Iterator[tuple[str, Callable[[], float], Callable[[], float]]]:
    seen = 4096
    token = [t[:, 0] for t in draw(512, 1)]
    turns = layer.tables(seen // layer.C + 64)

    def one(backend: str = "triton") -> Callable[[], Tensor]:
        cache = layer.full_cache(512, seen, seen + 512)
        q, k, v, gate = token

        def run() -> Tensor:
            return rat_attention_step(
                q, k, v, gate, cache, position_embeddings=turns, sigmoid_gate=True, backend=backend
            )

        torch.manual_seed(0)
        for x in (cache.keys, cache.values, cache.running_key, cache.running_value):
            assert x is not None
            x.normal_()
        return run

    for pick in CANDIDATES["step"]:

        def measure(pick: Launch = pick) -> float:
            with mock.patch.dict(launch.TABLE, {"step": pick}):
                return bench.time_graph_ms(one(), inner=5, repeats=5)

        def error(pick: Launch = pick) -> float:
            with mock.patch.dict(launch.TABLE, {"step": pick}):
                ours, expected = one()().float(), one("chunked")().float()
            return float((ours - expected).norm() / expected.norm())

        yield str(pick), error, measure


def summaries() -> None:
    """Forward and backward times of each way to attend, by the number of summaries."""
    for T in (1024, 2048, 4096, 8192, 32768):
        x, turns = [t.requires_grad_() for t in draw((1 << 17) // T, T)], layer.tables(T // layer.C)
        do = torch.randn(*x[0].shape[:2], layer.H, layer.K, device=bench.DEVICE, dtype=torch.bfloat16)
        found = []
        for kernel in (None, "cudnn", "flash"):
            with mock.patch.object(triton_path, "dense_kernel", lambda *_, kernel=kernel: kernel):
                try:
                    ms = bench.time_ms(lambda: torch.autograd.grad(attend(x, turns), x, do), repeats=3, warmup=1)  # noqa: B023
                    found.append(f"{kernel or 'triton'} {ms:.2f} ms (error {check():.1e})")
                except Exception as problem:
                    found.append(f"{kernel}: {type(problem).__name__}: {problem}".splitlines()[0][:80])
        print(f"{T // layer.C:5} summaries  " + "   ".join(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", nargs="*", default=["summaries", *CANDIDATES])
    parser.add_argument("--seconds", type=float, default=60.0, help="start no candidate after this; default 60")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    best: dict[str, tuple[float, str]] = {}
    for name in arguments.kernel:
        if name == "summaries":
            summaries()
            continue
        with mock.patch.object(triton_path, "dense_kernel", lambda *_: None):
            for config, error, measure in kernel_of(name):
                if time.monotonic() > until:
                    break
                try:
                    wrong, ms = error(), measure()
                except Exception as problem:  # a candidate may not fit
                    print(f"{name:9} {config}  {type(problem).__name__}: {problem}".splitlines()[0][:110], flush=True)
                    continue
                print(f"{name:9} {config}  {ms:.4f} ms  error {wrong:.1e}", flush=True)
                if wrong < 2e-2 and ms < best.get(name, (float("inf"), ""))[0]:
                    best[name] = (ms, config)
        torch.cuda.empty_cache()
    print("best:")
    for name, (ms, config) in best.items():
        print(f"  {name:9} {config}  {ms:.4f} ms")


if __name__ == "__main__":
    main()
