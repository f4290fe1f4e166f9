"""`linearize recipes ls|show|cp|compare`: the built-in recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from linearize.recipes.commands.app import JsonFlag, app, bad_input

recipes_app = typer.Typer(no_args_is_help=True, help="The built-in recipes: list, show, copy, compare.")
app.add_typer(recipes_app, name="recipes")

Name = Annotated[str, typer.Argument(help="a built-in recipe's name, or a recipe's file")]


def _file(name: str) -> Path:
    from linearize.recipes.builtin import builtin_file, builtin_recipes

    file = builtin_file(name) or Path(name)
    if not file.is_file():
        raise bad_input(f"there is no recipe {name!r}; built in are {', '.join(builtin_recipes())}")
    return file


@recipes_app.command("ls")
def list_recipes(as_json: JsonFlag = False) -> None:
    """List the built-in recipes."""
    from linearize.recipes.builtin import about, builtin_recipes

    first = {name: about(file).splitlines()[0] for name, file in builtin_recipes().items()}
    if as_json:
        print(json.dumps(first))
        return
    for name, line in first.items():
        print(f"{name:16s} {line}")


@recipes_app.command()
def show(name: Name, as_json: JsonFlag = False) -> None:
    """Show a recipe: where it comes from, its numbers and cost, every key."""
    from linearize.recipes.builtin import about
    from linearize.recipes.forms import to_yaml
    from linearize.recipes.schema import load_recipe

    file = _file(name)
    recipe = load_recipe(name)
    if as_json:
        print(json.dumps(recipe.model_dump(mode="json")))
        return
    if file.suffix == ".py":
        print(about(file) + "\n")
    print(to_yaml(recipe), end="")


@recipes_app.command()
def cp(
    name: Name,
    to: Annotated[Path | None, typer.Argument(help="file to write; default the recipe's name here")] = None,
    yaml: Annotated[bool, typer.Option("--yaml", help="as YAML with a comment per key, not as Python")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace the file")] = False,
) -> None:
    """Copy a recipe out, to be changed and run with `convert TEACHER --recipe FILE`."""
    from linearize.recipes.forms import to_python, to_yaml
    from linearize.recipes.schema import load_recipe

    file = _file(name)
    suffix = ".yaml" if yaml else ".py"
    target = to or Path(file.stem + suffix)
    if target.suffix not in ((".yaml", ".yml") if yaml else (".py",)):
        raise bad_input(f"{target} should end in {suffix}; --yaml writes YAML, without it Python is written")
    if target.exists() and not force:
        raise bad_input(f"{target} exists already; give another name or --force")
    recipe = load_recipe(name)
    python = file.read_text(encoding="utf-8") if file.suffix == ".py" else to_python(recipe)
    target.write_text(to_yaml(recipe) if yaml else python, encoding="utf-8")
    print(target)


@recipes_app.command()
def compare(
    teacher: Annotated[str, typer.Option(help="'llama' (bundled), a model folder or a Hub id")] = "llama",
    tokens: Annotated[str, typer.Option(help="training tokens of each recipe, such as 200k")] = "200k",
    recipes: Annotated[str | None, typer.Option(help="names or files, with commas; default all built-in ones")] = None,
    data: Annotated[str | None, typer.Option(help="text to train and measure on")] = None,
    context: Annotated[int | None, typer.Option(help="tokens per training sequence; default each recipe's")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of everything random")] = None,
    out: Annotated[Path, typer.Option(help="folder for students, table and JSON")] = Path("comparison"),
    as_json: JsonFlag = False,
) -> None:
    """Run recipes at equal tokens and print final loss, KL, agreement, time and memory."""
    from dataclasses import asdict

    from linearize.recipes.comparison import check_rows, compare_recipes, to_markdown
    from linearize.recipes.schema import parse_tokens

    given = {"--data": data, "--context": context, "--seed": seed}
    more = [text for flag, value in given.items() if value is not None for text in (flag, str(value))]
    count = parse_tokens(tokens)
    names = [name for name in (recipes or "").split(",") if name]
    rows = compare_recipes(teacher, count, names, out, more)
    print(json.dumps([asdict(row) for row in rows]) if as_json else to_markdown(rows, teacher, count), end="")
    check_rows(rows)
