"""`convert TEACHER --to MIXER`: the main job."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from linearize.recipes.commands.app import EXIT_FAILED, JsonFlag, app, bad_input, convert_app, parse_options


@convert_app.command()
@app.command("convert")
def convert(
    teacher: Annotated[str, typer.Argument(help="'llama' (bundled), a model folder or a Hub id")],
    to: Annotated[
        str | None, typer.Option(help="mixer (default rodimus), rodimus:0-7,rat:8-15 by layer, or plan.yaml")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the student; default <teacher>-<mixer>")] = None,
    data: Annotated[str | None, typer.Option(help="text, .jsonl, folder or dataset to train and measure on")] = None,
    tokens: Annotated[
        str | None, typer.Option(help="training tokens of all stages together, such as 400k or 2M")
    ] = None,
    context: Annotated[int | None, typer.Option(help="tokens per training sequence")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of everything random")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default a GPU when there is one")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 of the student")] = None,
    window: Annotated[int | None, typer.Option(help="softmax window beside the recurrence; 0 for none")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for every mixer that has it, MIXER.NAME=VALUE for one")
    ] = None,
    ffn: Annotated[str | None, typer.Option(help="channel mixer that replaces the MLPs, such as cdmoe")] = None,
    ffn_option: Annotated[list[str] | None, typer.Option(help="an option of the channel mixer, NAME=VALUE")] = None,
    keep_softmax: Annotated[str | None, typer.Option(help="layers that keep their attention: 0,3 or 25%")] = None,
    recipe: Annotated[
        str, typer.Option(help="a built-in recipe (linearize recipes ls), a .py or a .yaml file; flags win over it")
    ] = "default",
    control: Annotated[
        bool | None, typer.Option("--control/--no-control", help="whether to train the window alone to compare with")
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="train through torch.compile; pays on GPUs")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision of the teacher")] = None,
    report_to: Annotated[
        list[str] | None, typer.Option(help="tensorboard, wandb or trackio, beside losses.csv")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and write nothing")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue a run that was stopped")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace what is in the output")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Convert TEACHER: plan, surgery, the recipe's training stages, merge, export, parity gate."""
    from pydantic import ValidationError

    from linearize.distill import processes
    from linearize.recipes import pipeline, schema
    from linearize.recipes.defaults import with_tokens
    from linearize.recipes.inspection import describe_recipe

    loaded = schema.load_recipe(recipe)
    options = dict(loaded.options)
    options |= parse_options(option or [])
    if window is not None:
        options["window"] = window
    ffn_options = {**loaded.ffn_options, **parse_options(ffn_option or [])}
    given = {
        "teacher": teacher, "to": to, "data": data, "context": context, "seed": seed, "device": device, "dtype": dtype,
        "keep_softmax": keep_softmax, "revision": revision, "ffn": ffn, "control": control,
        "compile": compile, "report_to": report_to or None,
    }  # fmt: skip
    changes = {key: value for key, value in given.items() if value is not None}
    try:
        built = schema.Recipe.model_validate(
            {**loaded.model_dump(), **changes, "options": options, "ffn_options": ffn_options}
        )
    except ValidationError as error:
        raise bad_input(schema.first_problem(error)) from None
    if tokens is not None:
        built = with_tokens(built, schema.parse_tokens(tokens))
    if dry_run:
        print(describe_recipe(built))
        return
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    summary = pipeline.run(built, out, resume, force, command)
    if processes.is_main():
        print(json.dumps(summary.model_dump(mode="json")) if as_json else summary.to_text())
    processes.stop()
    if not summary.gate["passed"]:
        raise typer.Exit(EXIT_FAILED)
