"""Find launch configurations for linear attention on this GPU: each candidate is timed, risky ones checked first.

    python -m linearize.kernels.linear_attention.tune [output.json] [seconds]

Candidates run in child processes. One that breaks the CUDA context ends its child, and the next child goes on behind it.
Prints one line per candidate and last the best of each kernel.
"""

# ruff: noqa: B008  (defaults keep each candidate's own values)
from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from linearize.kernels import bench
from linearize.kernels.linear_attention import launch, linear_attention, linear_attention_step
from linearize.kernels.linear_attention import triton_finish as finishing
from linearize.kernels.linear_attention import triton_prepare as preparing
from linearize.kernels.linear_attention import triton_scan as scanning
from linearize.kernels.linear_attention.launch import Launch
from linearize.kernels.linear_attention.triton_common import Packing

Candidate = tuple[str, str, str, Callable[[], dict[str, float]]]  # kernel, case, configuration, measurement


@contextlib.contextmanager
def choosing(**choices: Any) -> Iterator[None]:
    """The launch table with some of its functions replaced by fixed answers."""
    with contextlib.ExitStack() as stack:
        for name, choice in choices.items():
            stack.enter_context(mock.patch.object(launch, name, lambda *_, choice=choice, **__: choice))
        yield


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def check(K: int, V: int, decay: str, H: int = 2, T: int = 1000) -> float:
    """Worst relative error of outputs and gradients against float64, strong and weak decays together."""
    x = bench.draw(1, T, H, K, V, decay)
    if decay != "none":
        strength = torch.logspace(-1, 1.5, x[3].shape[1], device=bench.DEVICE)
        x[3] = x[3] * strength.view(1, -1, *[1] * (x[3].dim() - 2))
    do = torch.randn_like(x[2])
    results = []
    for double, backend in ((False, "triton"), (True, "chunked")):
        leaves = [(t.double() if double else t).detach().requires_grad_() for t in x]
        o, _ = linear_attention(*leaves, backend=backend)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype))])
    return max(error(a, b) for a, b in zip(*results, strict=True))


def scans() -> Iterator[Candidate]:
    """`_scan` in each of its roles at B4 T8192 H32 K128 V128."""
    B, T, H, K, V = 4, 8192, 32, 128, 128
    for decay, rowdots in (("none", False), ("scalar", False), ("scalar", True)):
        q, k, v, *rest = bench.draw(B, T, H, K, V, decay)
        g, o, packing = (rest[0] if rest else None), torch.empty_like(v), Packing(B, T, None)
        for block, warps, stages in ((64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 8, 2)):
            pick = Launch(block, warps, stages)
            extra = v if rowdots else None
            rowdot = torch.empty(-(-K // block), 2, B, H, T, device=bench.DEVICE) if rowdots else None

            def run(q=q, k=k, v=v, o=o, g=g, packing=packing, pick=pick, extra=extra, rowdot=rowdot):
                options = {"out": o, "log_decay": g, "extra": extra, "rowdot": rowdot, "launch": pick}
                return {
                    "ms": bench.time_ms(lambda: scanning.scan(packing, q, k, v, reverse=extra is not None, **options))
                }

            yield ("scan with row dots" if rowdots else "scan"), decay, str((block, warps, stages)), run


def vector_pieces(B: int, T: int, H: int, K: int, V: int) -> Iterator[Candidate]:
    """The kernels of a decay per channel, one by one."""
    case = f"B{B} T{T} H{H} K{K} V{V}"
    q, k, v, g = bench.draw(B, T, H, K, V, "vector")
    packing, o = Packing(B, T, None), torch.empty_like(v)
    for block, warps in ((64, 4), (128, 8))[: K // 64]:

        def prepare(pick=Launch(block, warps, 1)) -> dict[str, float]:
            with choosing(prepare_launch=pick):
                return {"ms": bench.time_ms(lambda: preparing.prepare(packing, q, k, g, None, 0.1))}

        yield "prepare", case, str((block, warps)), prepare
    q_out, k_out, scores, total = preparing.prepare(packing, q, k, g, None, 0.1)
    states = torch.empty(packing.chunks, H, K, V, dtype=q.dtype, device=bench.DEVICE)
    forward = {"out": o, "scores": scores, "total": total}
    roles: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
        "scan with scores": ((q_out, k_out, v), forward),
        "scan for states": ((k_out, k_out, v), {"total": total, "states": states}),
        "scan for dv and states": ((k_out, q_out, v), {**forward, "states": states, "reverse": True}),
    }
    for name, (operands, options) in roles.items():
        for block, warps, stages in ((64, 4, 3), (128, 4, 2), (128, 4, 3), (256, 8, 2)):
            if block > V:
                continue

            def run(pick=Launch(block, warps, stages), operands=operands, options=options) -> dict[str, float]:
                return {"ms": bench.time_ms(lambda: scanning.scan(packing, *operands, launch=pick, **options))}

            yield name, case, str((block, warps, stages)), run
    for warps, stages, v_block in ((4, 2, 64), (4, 1, 64), (4, 3, 64), (4, 1, 128), (8, 2, 64)):

        def finish(pick=(Launch(64, warps, stages), v_block)) -> dict[str, float]:
            def run() -> None:
                finishing.finish(packing, q, k, v, g, None, 0.1, v, states, states, total, True)

            with choosing(finish_weak_launch=pick):
                return {"error": check(K, min(V, 256), "vector"), "ms": bench.time_ms(run)}

        yield "finish", case, str((64, warps, stages, v_block)), finish


def one_sequence() -> Iterator[Candidate]:
    """How to cut B1 T32768 H1 K64 V4096."""
    x = bench.draw(1, 32768, 1, 64, 4096, "vector")
    for pick, count in itertools.product(
        (Launch(64, 4, 3), Launch(128, 4, 2), Launch(128, 4, 3), Launch(256, 8, 2)), (4, 8, 16)
    ):

        def run(pick=pick, count=count) -> dict[str, float]:
            with choosing(scan_launch=pick, segments=count), torch.no_grad():
                return {"ms": bench.time_graph_ms(lambda: linear_attention(*x), inner=4)}

        yield "one sequence", "forward", f"{(pick.block, pick.warps, pick.stages)} in {count}", run


def steps() -> Iterator[Candidate]:
    """One decoding step; states are taken in turn, or a small one would stay in the cache."""
    for B, H, K, V in bench.STEP_SHAPES:
        q, k, v, g = (x[:, 0] for x in bench.draw(B, 1, H, K, V, "vector"))
        count = max(1, min(8, (1 << 28) // (4 * B * H * K * V)))
        states = [torch.randn(B, H, K, V, device=bench.DEVICE) for _ in range(count)]
        for block, warps in ((16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 4), (128, 8)):
            if block * K > 16384 or block > V:
                continue

            def run(q=q, k=k, v=v, g=g, states=states, pick=Launch(block, warps, 1)) -> dict[str, float]:
                def once() -> None:
                    for state in states:
                        linear_attention_step(q, k, v, state, g)

                with choosing(step_launch=pick):
                    ms = bench.time_graph_ms(once) / len(states)
                return {"ms": ms, "gbs": 2e-6 * states[0].nbytes / ms}

            yield "step", f"B{B} H{H} K{K} V{V}", str((block, warps)), run


GROUPS: dict[str, Callable[[], Iterator[Candidate]]] = {
    "vector": lambda: vector_pieces(4, 8192, 32, 128, 128),
    "wide": lambda: vector_pieces(8, 4096, 1, 64, 4096),
    "one": one_sequence,
    "steps": steps,
    "scans": scans,
}


def child(group: str, first: int) -> None:
    """Measure the candidates of a group from `first` on; ends early where the CUDA context is lost."""
    for number, (kernel, case, config, measure) in enumerate(GROUPS[group]()):
        if number < first:
            continue
        row: dict[str, Any] = {"number": number, "kernel": kernel, "case": case, "config": config}
        try:
            row.update(measure())
        except Exception as problem:
            row["failed"] = f"{type(problem).__name__}: {problem}".splitlines()[0][:100]
        print(json.dumps(row), flush=True)
        torch.cuda.synchronize()  # raises, and so ends this child, if the context is lost


def collect(group: str, until: float) -> list[dict[str, Any]]:
    """Run children until every candidate of the group has a row or time is up."""
    rows: list[dict[str, Any]] = []
    while time.monotonic() < until:
        command = [sys.executable, "-m", __spec__.name, "--child", group, str(rows[-1]["number"] + 1 if rows else 0)]
        done = len(rows)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    rows.append(json.loads(line))
                    print(
                        "  ".join(
                            f"{value:.4g}" if isinstance(value, float) else str(value) for value in rows[-1].values()
                        ),
                        flush=True,
                    )
                if time.monotonic() > until:
                    process.kill()
        if process.returncode == 0 or len(rows) == done:
            break
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]))
        return
    until = time.monotonic() + (float(sys.argv[2]) if len(sys.argv) > 2 else 500.0)
    rows = [row for group in GROUPS for row in collect(group, until)]
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["kernel"], row["case"])
        if "ms" in row and row.get("error", 0.0) < 2e-2 and row["ms"] < best.get(key, row)["ms"] + 1e-9:
            best[key] = row
    print("best:")
    for (kernel, case), row in best.items():
        print(f"  {kernel:24} {case:26} {row['config']:24} {row['ms']:.4f} ms")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
