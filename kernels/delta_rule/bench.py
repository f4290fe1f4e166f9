"""Benchmark rows of the delta rule, beside fla where it is installed; `pieces()` times the single kernels.

python -m linearize.kernels.delta_rule.bench [pieces none|scalar|vector [I N]]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from unittest import mock

import torch
from torch import Tensor

from linearize.kernels import bench
from linearize.kernels.delta_rule import delta_rule, delta_rule_step

SHAPES = [
    # B, T, H, K, V, decays
    (4, 8192, 32, 128, 128, ("none", "scalar", "vector")),
    (8, 4096, 16, 64, 64, ("scalar",)),
]
STEP_SHAPES = [(256, 32, 128, 128), (1, 32, 128, 128)]


def draw(B: int, T: int, H: int, K: int, V: int, decay: str) -> list[Tensor]:
    """q, k, v, beta and a float32 log decay as a trained model has them; keys of length 1."""
    q, k, v, *g = bench.draw(B, T, H, K, V, decay)
    k = torch.nn.functional.normalize(k.float(), dim=-1).to(q.dtype)
    return [q, k, v, torch.rand(B, T, H, device=q.device), *g]


def work(B: int, T: int, H: int, K: int, V: int, decay: str) -> tuple[tuple[float, float], ...]:
    """(bytes, operations) an ideal kernel has for the forward pass, and for both passes together."""
    tokens, chunk = B * T * H, 64
    gates = 4 + {"none": 0, "scalar": 4, "vector": 4 * K}[decay]
    read = tokens * (2 * (2 * K + V) + gates)
    write = tokens * 2 * V
    operations = tokens * (chunk * (6 * K + 4 * V) + 6 * K * V)
    return (read + write, operations), (2 * (read + write) + read, 3.5 * operations)


def delta_rule_rows(
    machine: bench.Machine, shapes: Iterable[tuple] = tuple(SHAPES), repeats: int = 20
) -> list[bench.Row]:
    """Ours and fla at each shape."""
    rows = []
    for B, T, H, K, V, decays in shapes:
        for decay in decays:
            inputs = draw(B, T, H, K, V, decay)
            (fb, fo), (bb, bo) = work(B, T, H, K, V, decay)
            for name, run in _implementations(decay).items():
                row = bench.Row(f"delta rule, {decay} decay", f"B{B} T{T} H{H} K{K} V{V}", name)
                row.forward_bound_ms, row.both_bound_ms = machine.bound_ms(fb, fo), machine.bound_ms(bb, bo)
                try:
                    row.forward_ms, row.both_ms, row.first_call_s, _ = bench.forward_and_both(run, inputs, repeats)
                except Exception as error:  # a peer that can't run must not end the benchmark
                    row.note = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                rows.append(row)
            del inputs
        torch.cuda.empty_cache()
    return rows


def _implementations(decay: str) -> dict[str, Callable[..., Tensor]]:
    result: dict[str, Callable[..., Tensor]] = {"linearize": lambda *x: delta_rule(*x)[0]}
    try:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
    except Exception:  # not installed, or not importable here
        return result
    peers: dict[str, Callable[..., Tensor]] = {
        "none": lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta.to(q.dtype))[0],
        "scalar": lambda q, k, v, beta, g: chunk_gated_delta_rule(q, k, v, g, beta.to(q.dtype))[0],
        "vector": lambda q, k, v, beta, g: chunk_kda(q, k, v, g, beta.to(q.dtype))[0],
    }
    return {**result, "fla": peers[decay]}


def step_rows(
    machine: bench.Machine, shapes: Iterable[tuple[int, int, int, int]] = tuple(STEP_SHAPES)
) -> list[bench.Row]:
    """One decoding step with a decay per head; the state is read and written once."""
    rows = []
    for B, H, K, V in shapes:
        q, k, v, beta, g = (x[:, 0] for x in draw(B, 1, H, K, V, "scalar"))
        # Several states in turn, or a small one would stay in the cache.
        count = max(1, min(8, (1 << 28) // (4 * B * H * K * V)))
        states = [torch.randn(B, H, K, V, device=q.device) for _ in range(count)]

        token = (q, k, v, beta)

        def run(token: tuple[Tensor, ...] = token, g: Tensor = g, states: list[Tensor] = states) -> None:
            for state in states:
                delta_rule_step(token[0], token[1], token[2], token[3], state, g)

        row = bench.Row("delta rule, one step", f"B{B} H{H} K{K} V{V}", "linearize")
        row.first_call_s, row.forward_ms = bench.time_steps(run, len(states))
        row.forward_bound_ms = machine.bound_ms(8.0 * B * H * K * V, 0)
        rows.append(row)
    return rows


def pieces(decay: str, share: tuple[int, int] | None = None) -> None:
    """Times of the single kernels at the shape with a target, under candidates of the launch table.

    Args:
        share: (i, n) compiles every n-th candidate from the i-th on and times nothing, so that n processes fill the
            cache of compiled kernels together.
    """
    from linearize.kernels.delta_rule import launch as table
    from linearize.kernels.delta_rule.triton_finish import finish
    from linearize.kernels.delta_rule.triton_prepare import Prepared
    from linearize.kernels.delta_rule.triton_scan import scan, scan_back
    from linearize.kernels.linear_attention.triton_common import Packing

    candidates = itertools.count()
    B, T, H, K, V = 4, 8192, 32, 128, 128
    q, k, v, beta, *rest = draw(B, T, H, K, V, decay)
    g = rest[0] if rest else None
    packing, scale = Packing(B, T, None), K**-0.5
    do, o, errors, dv = (torch.randn_like(v) for _ in range(4))
    states, dstates = (torch.empty(packing.chunks, H, K, V, dtype=v.dtype, device=v.device) for _ in range(2))
    ready = Prepared(packing, q, k, v, beta, g, scale, keep=True)

    def timed(kernel: str, name: str, choices: Iterable[tuple[int, int, int, int | None]], run: Callable) -> None:
        for block, warps, stages, v_block in choices:
            if share is not None and next(candidates) % share[1] != share[0]:
                continue
            pick = table.Launch(block, warps, stages)
            value = pick if v_block is None else (pick, v_block)
            with mock.patch.object(table, name, lambda *_, value=value, **__: value):
                try:
                    if share is not None:
                        run()
                        continue
                    line = f"{bench.time_ms(run, repeats=8, warmup=2):.4f} ms"
                except Exception as error:
                    line = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            print(f"{kernel:14} block {block:4} warps {warps} stages {stages} v_block {v_block}  {line}", flush=True)

    scans = [(block, warps, stages, None) for block, warps, stages in itertools.product((64, 128), (4, 8), (1, 2))]
    tiles = [(64, warps, stages, v) for warps, stages, v in itertools.product((4, 8), (1, 2), (64, 128))]
    timed("scan", "scan_launch", scans, lambda: scan(packing, ready, beta, g, None, o=o))
    timed("scan back", "scan_launch", scans, lambda: scan_back(
        packing, ready, beta, g, do, None, dv=dv, dstates=dstates, dstart=None))  # fmt: skip
    timed("finish", "finish_launch", tiles, lambda: finish(
        packing, q, k, beta, g, scale, errors, do, dv, states, dstates, True))  # fmt: skip
    timed("prepare", "prepare_launch", tiles, lambda: Prepared(packing, q, k, v, beta, g, scale, keep=False))
    timed("scan, states", "scan_launch", scans, lambda: scan(
        packing, ready, beta, g, None, errors=errors, states=states))  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["pieces"]:  # pieces DECAY [I N]
        pieces(sys.argv[2], (int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 3 else None)
        return
    machine = bench.measure_machine()
    print(bench.table(delta_rule_rows(machine) + step_rows(machine)), flush=True)


if __name__ == "__main__":
    main()
