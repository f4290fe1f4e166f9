"""`linearize estimate [RECIPE]`: what a conversion costs, before it runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from linearize.recipes.commands.app import JsonFlag, app, parse_options


@app.command()
def estimate(
    recipe: Annotated[str | None, typer.Argument(help="a built-in recipe's name or a recipe's file")] = None,
    teacher: Annotated[str | None, typer.Option(help="'llama' (bundled), a model folder or a Hub id")] = None,
    to: Annotated[str | None, typer.Option(help="mixer or plan, as `convert --to` takes it")] = None,
    tokens: Annotated[str | None, typer.Option(help="training tokens of all stages together")] = None,
    option: Annotated[list[str] | None, typer.Option(help="an option of the mixer, NAME=VALUE (repeatable)")] = None,
    gpu: Annotated[str | None, typer.Option(help="h200, h100, a100, l4, rtx4090, ... or cpu")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Parameters that train, memory, disk, operations and hours of a conversion; nothing is written."""
    from linearize.recipes.defaults import with_tokens
    from linearize.recipes.estimate import estimate as count
    from linearize.recipes.schema import Recipe, load_recipe, parse_tokens

    loaded = load_recipe(recipe) if recipe is not None else Recipe()
    given = {"teacher": teacher, "to": to}
    changes = {key: value for key, value in given.items() if value is not None}
    changed = loaded.model_copy(update={**changes, "options": {**loaded.options, **parse_options(option or [])}})
    if tokens is not None:
        changed = with_tokens(changed, parse_tokens(tokens))
    result = count(changed, gpu)
    print(json.dumps(result.to_json()) if as_json else result.to_text())
