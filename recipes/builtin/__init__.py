"""The built-in recipes, one small module each: `recipe = Recipe(...)`, and where it comes from in its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

_FOLDER = Path(__file__).parent


def builtin_recipes() -> dict[str, Path]:
    """Every built-in recipe's file by its name."""
    files = sorted(f for f in _FOLDER.glob("*.py") if f.stem != "__init__")
    return {f.stem.replace("_plus_plus", "++").replace("_", "-"): f for f in files}


def builtin_file(name: str) -> Path | None:
    """The module of a built-in recipe; None if there is none of that name."""
    return builtin_recipes().get(name)


def about(file: Path) -> str:
    """What a recipe's module says about itself."""
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
