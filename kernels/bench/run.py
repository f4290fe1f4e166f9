"""Which families of kernels can be measured, and how their rows are collected and stored."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from linearize.kernels.bench.table import Row
from linearize.kernels.bench.timing import Machine, measure_machine


def _linear(machine: Machine, repeats: int) -> list[Row]:
    from linearize.kernels.bench.linear import linear_attention_rows

    return linear_attention_rows(machine, repeats=repeats)


def _delta(machine: Machine, repeats: int) -> list[Row]:
    from linearize.kernels.delta_rule.bench import delta_rule_rows

    return delta_rule_rows(machine, repeats=repeats)


def _scan(machine: Machine, repeats: int) -> list[Row]:
    from linearize.kernels.bench.scan import scan_rows

    return scan_rows(machine, repeats=repeats)


def _rat(machine: Machine, repeats: int) -> list[Row]:
    from linearize.kernels.bench.rat import layer_rows
    from linearize.kernels.rat_attention.bench import rows as window_rows

    return layer_rows(machine, repeats=min(repeats, 5)) + window_rows(machine, repeats)


def _decode(machine: Machine, repeats: int) -> list[Row]:
    from linearize.kernels.bench.linear import step_rows
    from linearize.kernels.bench.rat import decode_rows
    from linearize.kernels.delta_rule.bench import step_rows as delta_step_rows

    return step_rows(machine) + delta_step_rows(machine) + decode_rows(machine)


def _loss(machine: Machine, repeats: int) -> list[Row]:
    from linearize.kernels.linear_loss.bench import rows

    return rows(machine, repeats=min(repeats, 10))


def _gates(machine: Machine, repeats: int) -> list[Row]:
    from linearize.kernels.branch_join.bench import rows as join_rows
    from linearize.kernels.gate_prep.bench import rows as gate_rows
    from linearize.kernels.norm_gate.bench import rows as norm_rows

    return gate_rows(machine, repeats) + norm_rows(machine, repeats) + join_rows(machine, repeats)


def _windows(machine: Machine, repeats: int) -> list[Row]:
    from linearize.kernels.short_conv.bench import rows as conv_rows
    from linearize.kernels.window_attention.bench import rows as window_rows
    from linearize.kernels.window_linear_attention.bench import rows as joint_rows

    return window_rows(machine, repeats) + joint_rows(machine, repeats) + conv_rows(machine, repeats)


FAMILIES: dict[str, Callable[[Machine, int], list[Row]]] = {
    "linear": _linear,
    "delta": _delta,
    "scan": _scan,
    "rat": _rat,
    "decode": _decode,
    "loss": _loss,
    "gates": _gates,
    "windows": _windows,
}


class NeedsGpuError(RuntimeError):
    """There is no CUDA GPU to measure."""


def kernel_rows(families: Sequence[str] = (), repeats: int = 20) -> list[Row]:
    """The benchmarks of the families named, or of all; a first row describes the machine.

    Raises:
        ValueError: a family is not one of `FAMILIES`.
        NeedsGpuError: there is no CUDA GPU.
    """
    if unknown := [name for name in families if name not in FAMILIES]:
        raise ValueError(f"there is no kernel family {unknown[0]!r} to measure; choose from {', '.join(FAMILIES)}")
    if not torch.cuda.is_available():
        raise NeedsGpuError("kernel benchmarks need a CUDA GPU, and torch sees none")
    machine = measure_machine()
    note = f"copy {machine.bandwidth / 1e9:.0f} GB/s, bf16 matmul {machine.matrix_rate / 1e12:.0f} TF/s"
    rows = [Row("machine", machine.name, f"torch {torch.__version__}", note=note)]
    for name in families or FAMILIES:
        rows += FAMILIES[name](machine, repeats)
        torch.cuda.empty_cache()
    return rows


def store(rows: Sequence[Row], path: str | Path) -> None:
    """Write the rows as JSON: a list of objects with `Row`'s fields."""
    Path(path).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
