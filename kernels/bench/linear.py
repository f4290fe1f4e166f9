"""Linear attention beside torch's attention and, where installed, fla."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from linearize.kernels.bench.table import Row
from linearize.kernels.bench.timing import DEVICE, Machine, forward_and_both, time_steps
from linearize.kernels.linear_attention import linear_attention, linear_attention_step

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
            rows.append(softmax_row(shape, draw(B, T, H, K, V, "none"), repeats))
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


def softmax_row(shape: str, inputs: list[Tensor], repeats: int) -> Row:
    """torch's causal softmax attention of q, k, v `[B, T, H, K]`."""

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
        row.first_call_s, row.forward_ms = time_steps(run, len(states))
        row.forward_bound_ms = machine.bound_ms(8.0 * B * H * K * V, 0)
        rows.append(row)
    return rows
