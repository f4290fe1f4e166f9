"""`linearize compare DIR DIR ...`: several students of one teacher side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from linearize.recipes.commands.app import JsonFlag, app


@app.command()
def compare(
    directories: Annotated[list[Path], typer.Argument(help="measured students, or their evaluation.json")],
    as_json: JsonFlag = False,
) -> None:
    """Put saved evaluations side by side: `linearize eval` each student first."""
    from linearize.distill.evaluate.suite import load_evaluation
    from linearize.distill.evaluate.text import comparison_json, comparison_text, distinct_names

    evaluations = [load_evaluation(directory) for directory in directories]
    names = distinct_names([evaluation.conditions.student for evaluation in evaluations])
    print(json.dumps(comparison_json(names, evaluations)) if as_json else comparison_text(names, evaluations))
