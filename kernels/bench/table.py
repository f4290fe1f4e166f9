"""What a kernel benchmark found: rows, and the table that is printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


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
