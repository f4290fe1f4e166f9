"""`linearize select TEACHER --to X --keep 25%`: which layers should keep softmax."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from linearize.recipes.commands.app import JsonFlag, app, parse_options


@app.command()
def select(
    teacher: Annotated[str, typer.Argument(help="'llama' (bundled), a model folder or a Hub id")],
    to: Annotated[str, typer.Option(help="what the others become, as `convert --to` takes it")] = "rodimus",
    keep: Annotated[str, typer.Option(help="share or number that keeps softmax")] = "25%",
    heads: Annotated[bool, typer.Option("--heads", help="rank groups of heads instead of layers")] = False,
    option: Annotated[list[str] | None, typer.Option(help="an option of the mixer, NAME=VALUE (repeatable)")] = None,
    data: Annotated[str | None, typer.Option(help="text to read; default Python's standard library")] = None,
    tokens: Annotated[str, typer.Option(help="how many tokens to read")] = "8k",
    context: Annotated[int, typer.Option(min=2, help="tokens per sequence")] = 512,
    seed: Annotated[int, typer.Option(help="of new tensors and the sample")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default a GPU when there is one")] = "auto",
    out: Annotated[Path | None, typer.Option(help="write the plan here, for `convert --to FILE`")] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite the plan's file")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Rank layers (or heads) by the KL of replacing each, and write a plan that keeps the costliest."""
    from linearize.recipes.layer_choice import choose_layers, write_plan
    from linearize.recipes.schema import parse_tokens

    options = parse_options(option or [])
    choice = choose_layers(teacher, to, keep, heads, options, data, parse_tokens(tokens), context, seed, device)
    if out is not None:
        write_plan(choice.plan, out, force)
    print(json.dumps(choice.to_json()) if as_json else choice.to_text())
    if out is not None and not as_json:
        print(f"written: convert {teacher} --to {out}")
