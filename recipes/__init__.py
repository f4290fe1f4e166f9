"""The top floor: recipes, the pipeline that runs them, the commands.

`convert` runs a whole conversion from Python and returns its typed summary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linearize.recipes.defaults import with_tokens
from linearize.recipes.pipeline import run
from linearize.recipes.schema import Recipe, load_recipe
from linearize.recipes.summary import Summary

__all__ = ["Recipe", "Summary", "convert", "load_recipe", "run"]


def convert(
    teacher: str = "llama",
    to: str = "rodimus",
    out: str | Path | None = None,
    tokens: int | None = None,
    resume: bool = False,
    force: bool = False,
    **settings: Any,
) -> Summary:
    """Convert, as `convert TEACHER --to MIXER` does.

    Args:
        tokens: training tokens of all stages together.
        settings: other fields of `Recipe`, such as `seed=1`, `data="text.txt"` or `options={"window": 0}`.

    Raises:
        ConversionError: bad input.
    """
    recipe = Recipe(teacher=teacher, to=to, **settings)
    if tokens is not None:
        recipe = with_tokens(recipe, tokens)
    return run(recipe, out, resume, force, command=f"linearize.recipes.convert({teacher!r}, to={to!r}, ...)")
