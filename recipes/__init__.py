"""The top floor: recipes, the pipeline that runs them, the commands.

`convert` runs a whole conversion from Python and returns its typed summary. Names are imported when they are first
used, so that the commands answer at once.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linearize.recipes.pipeline import run
    from linearize.recipes.schema import Recipe, load_recipe
    from linearize.recipes.summary import Summary

__all__ = ["Recipe", "Summary", "convert", "load_recipe", "run"]

_HOMES = {"Recipe": "schema", "load_recipe": "schema", "run": "pipeline", "Summary": "summary"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def convert(
    teacher: str | None = None,
    to: str | None = None,
    out: str | Path | None = None,
    tokens: int | None = None,
    resume: bool = False,
    force: bool = False,
    recipe: str | Path | Recipe | None = None,
    **settings: Any,
) -> Summary:
    """Convert, as `convert TEACHER --to MIXER` does.

    Args:
        teacher, to: default the recipe's, which are "llama" and "rodimus" unless it says otherwise.
        tokens: training tokens of all stages together.
        recipe: a built-in recipe's name, a file, or a recipe; default `default`.
        settings: other fields of `Recipe`, such as `seed=1`, `data="text.txt"` or `options={"window": 0}`.

    Raises:
        ConversionError: bad input.
    """
    from linearize.recipes.defaults import with_tokens
    from linearize.recipes.pipeline import run
    from linearize.recipes.schema import Recipe, load_recipe

    base = recipe if isinstance(recipe, Recipe) else load_recipe(recipe or "default")
    given = {key: value for key, value in (("teacher", teacher), ("to", to)) if value is not None}
    built = Recipe.model_validate({**base.model_dump(), **given, **settings})
    if tokens is not None:
        built = with_tokens(built, tokens)
    return run(built, out, resume, force, command=f"linearize.recipes.convert({built.teacher!r}, to={built.to!r}, ...)")
