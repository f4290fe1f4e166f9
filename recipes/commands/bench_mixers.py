"""`linearize bench mixers`: every mixer on one teacher."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from linearize.recipes.commands.app import EXIT_FAILED, JsonFlag, bench_app


@bench_app.command("mixers")
def bench_mixers(
    mixers: Annotated[str | None, typer.Option(help="names, divided by commas; default all")] = None,
    teacher: Annotated[str, typer.Option(help="'llama' (bundled), a model folder or a Hub id")] = "llama",
    tokens: Annotated[str, typer.Option(help="training tokens of each conversion, such as 200k")] = "200k",
    data: Annotated[str | None, typer.Option(help="text to train and measure on")] = None,
    seed: Annotated[int, typer.Option(help="seed of every conversion")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes a GPU when there is one")] = "auto",
    out: Annotated[Path, typer.Option(help="folder for students and tables")] = Path("bench-mixers"),
    force: Annotated[bool, typer.Option("--force", help="start over; default: go on where it was stopped")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Convert one teacher with every mixer and print what each loses and saves."""
    from linearize.recipes.mixer_bench import bench_mixers as run
    from linearize.recipes.mixer_bench import mixer_rows_table
    from linearize.recipes.schema import parse_tokens

    names = [name.strip() for name in mixers.split(",")] if mixers else []
    settings: dict[str, Any] = {"seed": seed, "device": device}
    rows = run(teacher, out, names, parse_tokens(tokens), data, force, **settings)
    print(json.dumps([asdict(row) for row in rows]) if as_json else mixer_rows_table(rows))
    if any(row.problem for row in rows):
        raise typer.Exit(EXIT_FAILED)
