"""Benchmark rows of the losses from hidden states, beside whole logits in plain torch.

python -m linearize.kernels.linear_loss.bench
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.kernels import bench
from linearize.kernels.linear_loss import linear_cross_entropy, linear_kl

SHAPES = [(8192, 2048, 128256)]  # N, D, vocab


def work(N: int, D: int, V: int, operation: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """(bytes, operations) an ideal kernel has for the forward pass, and for both passes together.

    Products are counted, and hidden states and heads once each; that logits never need to leave a chip makes this a
    bound no chunked form can meet.
    """
    heads = 2 if operation == "cross-entropy + KL" else 1
    forward = heads * 2.0 * N * D * V
    trained = operation == "cross-entropy, trained head"
    read = heads * 2.0 * (N * D + V * D)
    return (read, forward), (read + 2.0 * N * D + 4.0 * V * D * trained, forward + (1 + trained) * 2.0 * N * D * V)


def rows(machine: bench.Machine, repeats: int = 10) -> list[bench.Row]:
    """Ours and plain torch at each shape."""
    found = []
    for N, D, V in SHAPES:
        generator = torch.Generator(bench.DEVICE).manual_seed(0)

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, generator=generator, device=bench.DEVICE).bfloat16()

        hidden, teacher, weight = normal(N, D), normal(N, D), normal(V, D) * D**-0.5
        labels = torch.randint(V, (N,), generator=generator, device=bench.DEVICE)
        for operation, (inputs, ways) in _implementations(hidden, teacher, weight, labels).items():
            (fb, fo), (bb, bo) = work(N, D, V, operation)
            for name, run in ways.items():
                row = bench.Row(operation, f"N{N} D{D} V{V}", name)
                row.forward_bound_ms, row.both_bound_ms = machine.bound_ms(fb, fo), machine.bound_ms(bb, bo)
                _measure(row, run, inputs, repeats)
                found.append(row)
    return found


def _measure(row: bench.Row, run: Callable[..., Tensor], inputs: list[Tensor], repeats: int) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        row.forward_ms, row.both_ms, row.first_call_s, row.host_ms = bench.forward_and_both(run, inputs, repeats)
        row.note = f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB at most"
    except Exception as error:  # whole logits may not fit
        row.note = f"{type(error).__name__}: {error}".splitlines()[0][:120]


def _implementations(
    hidden: Tensor, teacher: Tensor, weight: Tensor, labels: Tensor
) -> dict[str, tuple[list[Tensor], dict[str, Callable[..., Tensor]]]]:
    """Inputs that train, and ways to the loss, by operation."""

    def plain_kl(hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        with torch.no_grad():
            log_p = F.linear(teacher, weight).float().log_softmax(-1)
        kl = F.kl_div(logits.float().log_softmax(-1), log_p, log_target=True, reduction="sum") / len(labels)
        return kl + 0.02 * F.cross_entropy(logits.float(), labels)

    def our_kl(hidden: Tensor) -> Tensor:
        return linear_kl(hidden, weight, teacher, weight, labels=labels, ce_weight=0.02).loss

    def plain_ce(hidden: Tensor, weight: Tensor = weight) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    def our_ce(hidden: Tensor, weight: Tensor = weight) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels)

    ce: dict[str, Callable[..., Tensor]] = {"linearize": our_ce, "torch": plain_ce}
    return {
        "cross-entropy": ([hidden], ce),
        "cross-entropy, trained head": ([hidden, weight], ce),
        "cross-entropy + KL": ([hidden], {"linearize": our_kl, "torch": plain_kl}),
    }


if __name__ == "__main__":
    print(bench.table(rows(bench.measure_machine())))
