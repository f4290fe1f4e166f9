"""`linearize bench kernels [FAMILY ...]`: times of the GPU kernels beside their bounds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from linearize.recipes.commands.app import JsonFlag, bad_input, bench_app


@bench_app.command("kernels")
def bench_kernels(
    families: Annotated[
        list[str] | None, typer.Argument(help="for example rat decode; default: all", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="where to store the rows, as JSON")] = Path("bench-kernels.json"),
    repeats: Annotated[int, typer.Option(min=1, help="timings per row")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """Time the kernels on this GPU, forward and backward, beside torch's attention and, where installed, fla."""
    from linearize.kernels.bench import FAMILIES, NeedsGpuError, kernel_rows, store, table

    if unknown := [name for name in families or () if name not in FAMILIES]:
        raise bad_input(f"bench kernels: there is no family {unknown[0]!r}; choose from {', '.join(FAMILIES)}")
    try:
        rows = kernel_rows(families or (), repeats)
    except NeedsGpuError as error:
        raise bad_input(f"bench kernels: {error}") from error
    store(rows, out)
    print(json.dumps([dataclasses.asdict(row) for row in rows]) if as_json else table(rows))
