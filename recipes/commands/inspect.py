"""`linearize inspect TEACHER`: what a conversion would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from linearize.recipes.commands.app import JsonFlag, app, parse_options


@app.command()
def inspect(
    teacher: Annotated[str, typer.Argument(help="'llama' (bundled), a model folder or a Hub id")],
    to: Annotated[str, typer.Option(help="a mixer, rodimus:0-7,rat:8-15 or plan.yaml")] = "rodimus",
    keep_softmax: Annotated[str | None, typer.Option(help="layers that keep their attention")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for every mixer that has it, MIXER.NAME=VALUE for one")
    ] = None,
    ffn: Annotated[str | None, typer.Option(help="channel mixer that replaces the MLPs, such as cdmoe")] = None,
    ffn_option: Annotated[list[str] | None, typer.Option(help="an option of the channel mixer, NAME=VALUE")] = None,
    errors: Annotated[
        bool | None,
        typer.Option(help="measure how far the student starts from its teacher; default when TEACHER is local"),
    ] = None,
    data: Annotated[str | None, typer.Option(help="text to measure on; default Python's standard library")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show which tensors go where and what would train."""
    from linearize.recipes.inspection import inspect_teacher
    from linearize.recipes.teachers import BUNDLED

    options, ffn_options = parse_options(option or []), parse_options(ffn_option or [])
    if errors is None:
        errors = teacher in BUNDLED or Path(teacher).expanduser().is_dir()
    report = inspect_teacher(teacher, to, keep_softmax, options, ffn, ffn_options, errors, data)
    print(json.dumps(report.to_json()) if as_json else report.to_text())
