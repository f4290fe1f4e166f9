"""A recipe's two written forms: YAML with a comment per key, and a Python file. Both load back to the same recipe."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from linearize.distill.stages import Stage
from linearize.recipes.schema import Recipe


def to_yaml(recipe: Recipe) -> str:
    """YAML of every key, each with what it means."""
    lines = ["# A recipe: convert TEACHER --recipe THIS_FILE"]
    for name in type(recipe).model_fields:
        if name == "stages" and recipe.stages is not None:
            lines += [f"stages:{_comment(recipe, name)}"]
            for stage in recipe.stages:
                lines += _list_item(stage)
        else:
            lines.append(_entry(recipe, name))
    return "\n".join(lines) + "\n"


def _list_item(stage: Stage) -> list[str]:
    written = [_entry(stage, name) for name in type(stage).model_fields]
    return [f"  {'- ' if i == 0 else '  '}{line}" for i, line in enumerate(written)]


def _entry(model: BaseModel, name: str) -> str:
    value = model.model_dump(mode="json")[name]
    flow = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return f"{name}: {flow.strip()[1:-1]}{_comment(model, name)}"


def _comment(model: BaseModel, name: str) -> str:
    description = type(model).model_fields[name].description
    return f"  # {description}" if description else ""


def to_python(recipe: Recipe, about: str = "A recipe: convert TEACHER --recipe THIS_FILE") -> str:
    """A Python file that defines `recipe`; what is at its default is left out."""
    kinds = sorted({type(stage).__name__ for stage in recipe.stages or ()})
    imports = [f"from linearize.distill.stages import {', '.join(kinds)}"] if kinds else []
    imports.append("from linearize.recipes import Recipe")
    lines = [f'"""{about}"""', "", *imports, "", "recipe = Recipe("]
    for name, value in _changed(recipe).items():
        if name == "stages":
            lines += ["    stages=[", *(f"        {_call(stage)}," for stage in recipe.stages or ()), "    ],"]
        else:
            lines.append(f"    {name}={value!r},")
    return "\n".join([*lines, ")"]) + "\n"


def _call(stage: Stage) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in _changed(stage).items())
    return f"{type(stage).__name__}({arguments})"


def _changed(model: BaseModel) -> dict[str, Any]:
    return {
        name: value
        for name, field in type(model).model_fields.items()
        if (value := getattr(model, name)) != field.get_default(call_default_factory=True)
    }
