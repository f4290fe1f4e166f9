"""`linearize scaling fit RUN RUN ...`: loss against compute, per mixer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from linearize.recipes.commands.app import JsonFlag, app

scaling_app = typer.Typer(no_args_is_help=True, help="Loss against compute over several runs.")
app.add_typer(scaling_app, name="scaling")


@scaling_app.callback()
def scaling() -> None:
    """Loss against compute over several runs."""


@scaling_app.command()
def fit(
    runs: Annotated[list[Path], typer.Argument(help="exported students, or JSONL tables of mixer, flops and loss")],
    at: Annotated[float | None, typer.Option(help="compute to predict at, FLOPs; default 10 x the largest run")] = None,
    level: Annotated[float, typer.Option(min=0.01, max=0.999, help="probability of the interval")] = 0.95,
    as_json: JsonFlag = False,
) -> None:
    """Fit L(C) = beta C^alpha per mixer and predict the loss at a larger compute, with its interval."""
    from linearize.recipes.scaling_runs import fit_runs

    result = fit_runs(runs, at, level)
    print(json.dumps(result.to_json()) if as_json else result.to_text())
