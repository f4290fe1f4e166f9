"""What a training benchmark found, as short text tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from linearize.distill.benchmarks.training import StepRow, TrainingReport

_GIB = 2**30


def report_text(report: TrainingReport) -> str:
    """Tables that read as Markdown too."""
    s = report.settings
    lines = [
        f"{s.teacher} to {s.to}, B{s.batch_size} T{s.context}, {str(s.dtype).removeprefix('torch.')}, {report.machine}, "
        f"matrix rate {report.matrix_rate / 1e12:.3g} TFLOP/s",
        f"{report.parameters:,} numbers, {report.new_parameters:,} of them new, {report.layers} mixers",
        "",
        *_table(
            ["step", "ms", "forward", "backward", "update", "tokens/s", "GFLOP/token", "matrix rate", "first s"],
            [_speed(row) for row in report.rows],
        ),
        "",
        *_table(
            ["step", "trains", "base GiB", "kept for backward", "peak", "peak - kept"],
            [_memory(row) for row in report.rows if not row.problem],
        ),
        *(f"- {row.name}: {row.problem}" for row in report.rows if row.problem),
        *_ratios(report.rows),
    ]
    for row in report.rows:
        if row.kernels is not None:
            lines += ["", *_kernels(row)]
    if report.parts:
        parts = [[name, f"{fwd:.3f}", f"{both:.3f}"] for name, (fwd, both) in report.parts.items()]
        lines += ["", *_table(["part of one layer, ms", "forward", "forward + backward"], parts)]
    return "\n".join(lines)


def report_json(report: TrainingReport) -> dict[str, Any]:
    """Everything that was found."""
    fields = asdict(report)
    fields["settings"]["dtype"] = str(report.settings.dtype)
    for row, found in zip(fields["rows"], report.rows, strict=True):
        row["flops"] = found.flops.to_json()
    return fields


def _speed(row: StepRow) -> list[str]:
    if row.problem:
        return [row.name, *[""] * 8]
    times = [f"{t:.1f}" for t in (row.ms, row.forward_ms, row.backward_ms, row.update_ms)]
    rates = [f"{row.tokens_per_s:,.0f}", f"{row.flops.total / 1e9:.3g}", f"{100 * row.mfu:.1f}%"]
    return [row.name, *times, *rates, f"{row.first_s:.1f}"]


def _memory(row: StepRow) -> list[str]:
    sizes = (row.base, row.held, row.peak, row.peak - row.held)
    return [row.name, f"{row.trains:,}", *(f"{size / _GIB:.2f}" for size in sizes)]


def _ratios(rows: list[StepRow]) -> list[str]:
    """The lora stage over the same without a teacher."""
    by_name = {row.name: row for row in rows if not row.problem}
    live, plain = by_name.get("lora"), by_name.get("lora without teacher")
    if live is None or plain is None:
        return []
    text = f"lora over lora without teacher: time {live.ms / plain.ms:.2f}"
    if plain.peak:
        aside = (live.peak - live.held) / max(1, plain.peak - plain.held)
        text += f", peak memory {live.peak / plain.peak:.3f}, without what is kept for backward {aside:.3f}"
    return ["", text]


def _kernels(row: StepRow) -> list[str]:
    found = row.kernels
    assert found is not None
    share = 100 / max(found.span, 1e-9)
    groups = [*found.groups.items(), ("idle", found.idle)]
    head = f"{row.name}: one step under the profiler, {found.span:.1f} ms, {found.kernels} kernels"
    by_group = _table(["kernels", "ms", "share"], [[n, f"{t:.2f}", f"{t * share:.1f}%"] for n, t in groups])
    top = _table(["longest", "ms", "calls"], [[name, f"{t:.2f}", str(calls)] for name, t, calls in found.top])
    return [head, "", *by_group, "", *top]


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "| " + " | ".join([first, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]) + " |"

    rule = "|" + "|".join(["-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)]) + "|"
    return [line(heads), rule, *map(line, rows)]
