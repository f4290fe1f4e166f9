"""Find launch configurations for linear attention on this GPU: each candidate is checked, then timed.

    python -m linearize.kernels.linear_attention.tune [output.json] [seconds]

Prints one line per candidate and last the benchmark table with the table's own choices.
"""

# ruff: noqa: B023  (candidates run at once, inside the loop that makes them)
from __future__ import annotations

import json
import sys
import time
from unittest import mock

import torch
import triton

from linearize.kernels import bench
from linearize.kernels.linear_attention import launch, linear_attention, linear_attention_step
from linearize.kernels.linear_attention import triton_backward as tb
from linearize.kernels.linear_attention import triton_decode as td
from linearize.kernels.linear_attention import triton_forward as tf

BEGAN = time.perf_counter()
LIMIT = float(sys.argv[2]) if len(sys.argv) > 2 else 500.0
RESULTS: list[dict] = []


def left() -> float:
    return LIMIT - (time.perf_counter() - BEGAN)


def say(**row) -> None:
    RESULTS.append(row)
    print(
        "  ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in row.items()
        ),
        flush=True,
    )


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def patched(scan=None, prepare=None, finish=None, step=None):
    """The launch table with some choices replaced."""
    stack = []
    if scan:
        stack += [
            mock.patch.object(tf, "scan_launch", lambda *_, **__: scan),
            mock.patch.object(tb, "scan_launch", lambda *_, **__: scan),
        ]
    if prepare:
        stack.append(mock.patch.object(tf, "prepare_launch", lambda *_: prepare))
    if finish:
        stack.append(mock.patch.object(tb, "finish_launch", lambda *_: finish))
    if step:
        stack.append(mock.patch.object(td, "step_launch", lambda *_: step))
    return stack


class together:
    def __init__(self, patches):
        self.patches = patches

    def __enter__(self):
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def check(K: int, V: int, decay: str, H: int = 2, T: int = 1000) -> float:
    """Worst relative error of outputs and gradients against float64, strong and weak decays together."""
    x = bench.draw(1, T, H, K, V, decay)
    if decay != "none":
        x[3] = x[3] * torch.logspace(-1, 1.5, x[3].shape[1], device=bench.DEVICE).view(
            1, -1, *[1] * (x[3].dim() - 2)
        )
    do = torch.randn_like(x[2])
    results = []
    for double, backend in ((False, "triton"), (True, "chunked")):
        leaves = [(t.double() if double else t).detach().requires_grad_() for t in x]
        o, _ = linear_attention(*leaves, backend=backend)
        results.append([o, *torch.autograd.grad(o, leaves, do.to(o.dtype))])
    return max(error(a, b) for a, b in zip(*results, strict=True))


def pieces() -> None:
    """Times of the single kernels at the shapes with targets."""
    B, T, H, K, V = 4, 8192, 32, 128, 128
    for decay in ("none", "scalar"):
        x = bench.draw(B, T, H, K, V, decay)
        q, k, v = x[:3]
        B, T, H, K = q.shape
        packing = tf.Packing(B, T, None)
        g = x[3] if decay == "scalar" else None
        o = torch.empty_like(v)
        for chunk in (64, 128):
            for block, warps, stages in (
                (64, 4, 2),
                (64, 4, 3),
                (64, 8, 2),
                (128, 8, 2),
                (128, 8, 1),
                (32, 4, 2),
                (64, 4, 1),
            ):
                if left() < 60:
                    return
                pick = launch.Launch(block, warps, stages)
                with mock.patch.object(tf, "CHUNK", chunk), mock.patch.object(tb, "CHUNK", chunk):
                    candidate(
                        "scan forward",
                        decay,
                        (chunk, block, warps, stages),
                        lambda: tf.scan(
                            tf.Packing(B, T, None), q, k, v, out=o, log_decay=g, scale=0.1, launch=pick
                        ),
                        lambda: scan_error(pick, K, V, decay),
                    )
        if decay == "scalar":
            for block, warps, stages in (
                (64, 8, 2),
                (64, 4, 2),
                (32, 4, 2),
                (64, 8, 1),
                (128, 8, 2),
                (32, 8, 2),
            ):
                pick = launch.Launch(block, warps, stages)
                rowdot = torch.empty(-(-K // block), 2, B, H, T, device=bench.DEVICE)
                candidate(
                    "scan rowdot reverse",
                    decay,
                    (64, block, warps, stages),
                    lambda: tf.scan(
                        packing,
                        q,
                        k,
                        v,
                        out=o,
                        log_decay=g,
                        scale=0.1,
                        extra=v,
                        rowdot=rowdot,
                        reverse=True,
                        launch=pick,
                    ),
                    None,
                )
            dots = torch.randn(2, 2, B, H, T, device=bench.DEVICE)
            candidate(
                "decay gradient",
                decay,
                (),
                lambda: tb._token_decay_gradient(dots, dots, g, None, None, packing),
                None,
            )
    x = bench.draw(B, T, H, K, V, "vector")
    vector_pieces(x, "128/128")
    torch.cuda.empty_cache()
    vector_pieces(bench.draw(8, 4096, 1, 64, 4096, "vector"), "64/4096")


def vector_pieces(inputs, label) -> None:
    q, k, v, g = inputs
    (B, T, H, K), V = q.shape, v.shape[3]
    packing = tf.Packing(B, T, None)
    for block, warps in ((32, 4), (64, 8), (32, 8), (16, 4)):
        pick = launch.Launch(block, warps, 1)
        with together(patched(prepare=pick)):
            candidate("prepare", label, (block, warps), lambda: tf.prepare(packing, q, k, g, None, 0.1), None)
    qo, ko, scores, total = tf.prepare(packing, q, k, g, None, 0.1)
    o = torch.empty_like(v)
    wide = V > 256
    for block, warps, stages in (
        (64, 4, 2),
        (64, 4, 3),
        (128, 4, 2),
        (128, 8, 2),
        (64, 8, 2),
        (128, 4, 3),
        (32, 4, 3),
    ):
        pick = launch.Launch(block, warps, stages)
        candidate(
            "scan scores forward",
            label,
            (block, warps, stages),
            lambda: tf.scan(packing, qo, ko, v, out=o, scores=scores, total=total, launch=pick),
            None,
        )
    states = torch.empty(packing.chunks, H, K, V, dtype=q.dtype, device=bench.DEVICE)
    dstates = torch.empty_like(states)
    for block, warps, stages in ((64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 8, 2), (32, 4, 3)):
        pick = launch.Launch(block, warps, stages)
        candidate(
            "scan states",
            label,
            (block, warps, stages),
            lambda: tf.scan(packing, ko, ko, v, total=total, states=states, launch=pick),
            None,
        )
        candidate(
            "scan dv states",
            label,
            (block, warps, stages),
            lambda: tf.scan(
                packing,
                ko,
                qo,
                v,
                out=o,
                scores=scores,
                total=total,
                states=dstates,
                reverse=True,
                launch=pick,
            ),
            None,
        )
    for block, warps, stages, v_block in (
        (64, 8, 1, 64),
        (64, 8, 2, 64),
        (32, 8, 2, 64),
        (32, 4, 1, 64),
        (32, 4, 2, 64),
        (32, 4, 3, 64),
        (32, 4, 2, 32),
        (64, 8, 2, 128),
        (64, 4, 2, 64),
    ):
        pick = (launch.Launch(block, warps, stages), v_block)
        with together(patched(finish=pick)):
            candidate(
                "finish",
                label,
                (block, warps, stages, v_block),
                lambda: finish(packing, q, k, v, g, states, dstates, launch_=pick),
                None if wide else lambda: check(K, V, "vector"),
            )


def finish(packing, q, k, v, g, states, dstates, launch_) -> None:
    """`_finish` alone, through the code that launches it with the scans left out."""
    with (
        mock.patch.object(tb, "scan", lambda *_, **__: None),
        mock.patch.object(tb, "prepare", lambda *_: (q, q, q, g)),
    ):
        tb._by_states(q, k, v, g, None, 0.1, None, None, packing, v, None, True, False)


def scan_error(pick, K, V, decay) -> float:
    with together(patched(scan=pick)):
        return check(K, V, decay)


def candidate(kernel, case, config, run, verify) -> None:
    if left() < 60:
        return
    row = {"kernel": kernel, "case": case, "config": str(config)}
    try:
        if verify is not None:
            row["error"] = verify()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        row["first_s"] = time.perf_counter() - began
        row["ms"] = bench.time_ms(run, repeats=8, warmup=2)
    except Exception as problem:
        row["failed"] = f"{type(problem).__name__}: {problem}".splitlines()[0][:100]
    say(**row)


def steps(machine) -> None:
    for B, H, K, V in bench.STEP_SHAPES:
        q, k, v, g = (x[:, 0] for x in bench.draw(B, 1, H, K, V, "vector"))
        states = [
            torch.randn(B, H, K, V, device=bench.DEVICE)
            for _ in range(max(1, min(8, (1 << 28) // (4 * B * H * K * V))))
        ]
        for block, warps in (
            (16, 4),
            (32, 4),
            (64, 4),
            (64, 8),
            (128, 4),
            (128, 8),
            (32, 2),
            (16, 2),
            (32, 8),
        ):
            if block * launch.padded(K) > 16384 or left() < 45:
                continue

            def run():
                for state in states:
                    linear_attention_step(q, k, v, state, g)

            with together(patched(step=launch.Launch(block, warps, 1))):
                ms = bench.time_graph_ms(run) / len(states)
            say(
                kernel="step",
                case=f"B{B} H{H} K{K} V{V}",
                config=f"({block}, {warps})",
                ms=ms,
                of_copy=8.0 * B * H * K * V / ms / 1e-3 / machine.bandwidth,
            )


def main() -> None:
    print("torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name(), flush=True)
    for decay in ("none", "scalar", "vector"):
        for K, V in ((64, 64), (128, 128)):
            say(kernel="whole", case=f"{decay} {K}/{V}", error=check(K, V, decay))
    machine = bench.measure_machine()
    say(kernel="machine", copy_gbs=machine.bandwidth / 1e9, matmul_tfs=machine.matrix_rate / 1e12)
    rows = bench.linear_attention_rows(machine, repeats=10)
    print(bench.table(rows), flush=True)
    pieces()
    steps(machine)
    print(bench.table(rows))
    print(f"best of {len(RESULTS)}:")
    best: dict[tuple, dict] = {}
    for row in RESULTS:
        if "ms" in row and row.get("error", 0.0) < 2e-2:
            key = (row["kernel"], row["case"])
            if key not in best or row["ms"] < best[key]["ms"]:
                best[key] = row
    for row in best.values():
        print(f"  {row['kernel']:22} {row['case']:22} {row['config']:18} {row['ms']:.4f} ms")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump({"candidates": RESULTS, "rows": [row.__dict__ for row in rows]}, file, indent=1)


if __name__ == "__main__":
    main()
