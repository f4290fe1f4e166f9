"""The commands `convert` and `linearize`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_STOPPED = 1, 2, 130

app = typer.Typer(
    name="linearize", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Turn a pretrained softmax Transformer into a fast linear-time one.",
)  # fmt: skip
convert_app = typer.Typer(name="convert", add_completion=False, pretty_exceptions_enable=False)

Directory = Annotated[Path, typer.Argument(help="an exported student")]
JsonFlag = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]


@convert_app.command()
@app.command("convert")
def convert(
    teacher: Annotated[str, typer.Argument(help="'llama' (bundled), a model folder or a Hub id")],
    to: Annotated[str | None, typer.Option(help="mixer that replaces softmax attention; default rodimus")] = None,
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
    option: Annotated[list[str] | None, typer.Option(help="an option of the mixer, NAME=VALUE (repeatable)")] = None,
    keep_softmax: Annotated[str | None, typer.Option(help="layers that keep their attention: 0,3 or 25%")] = None,
    recipe: Annotated[Path | None, typer.Option(help="a recipe, .yaml or .py; flags given here win over it")] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision of the teacher")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and write nothing")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue a run that was stopped")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace what is in the output")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Convert TEACHER: plan, surgery, attention transfer, LoRA, merge, export, parity gate."""
    from pydantic import ValidationError

    from linearize.recipes import pipeline, schema
    from linearize.recipes.defaults import with_tokens
    from linearize.recipes.inspection import describe_recipe

    loaded = schema.load_recipe(recipe) if recipe is not None else schema.Recipe()
    options = dict(loaded.options)
    options |= _options(option or [])
    if window is not None:
        options["window"] = window
    given = {
        "teacher": teacher, "to": to, "data": data, "context": context, "seed": seed, "device": device, "dtype": dtype,
        "keep_softmax": keep_softmax, "revision": revision,
    }  # fmt: skip
    changes = {key: value for key, value in given.items() if value is not None}
    try:
        built = schema.Recipe.model_validate({**loaded.model_dump(), **changes, "options": options})
    except ValidationError as error:
        raise _bad_input(schema.first_problem(error)) from None
    if tokens is not None:
        built = with_tokens(built, schema.parse_tokens(tokens))
    if dry_run:
        print(describe_recipe(built))
        return
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    summary = pipeline.run(built, out, resume, force, command)
    print(json.dumps(summary.model_dump(mode="json")) if as_json else summary.to_text())
    if not summary.gate["passed"]:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def verify(directory: Directory, as_json: JsonFlag = False) -> None:
    """Run the parity gate on an exported student."""
    from linearize.convert.verify import verify as run_gate

    report = run_gate(directory)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        for check in report.checks:
            mark = "ok    " if check.passed else "FAILED"
            print(f"{mark}  {check.name:58s} {check.value:10.2e}  limit {check.limit:.0e}  {check.detail}".rstrip())
        print("parity gate passed" if report.passed else "parity gate FAILED")
    if not report.passed:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def inspect(
    teacher: Annotated[str, typer.Argument(help="'llama' (bundled), a model folder or a Hub id")],
    to: Annotated[str, typer.Option(help="mixer to plan for")] = "rodimus",
    keep_softmax: Annotated[str | None, typer.Option(help="layers that keep their attention")] = None,
    option: Annotated[list[str] | None, typer.Option(help="an option of the mixer, NAME=VALUE")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show which tensors go where and what would train."""
    from linearize.recipes.inspection import inspect_teacher

    report = inspect_teacher(teacher, to, keep_softmax, _options(option or []))
    print(json.dumps(report.to_json()) if as_json else report.to_text())


@app.command()
def generate(
    directory: Directory,
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    max_new_tokens: Annotated[int, typer.Option(help="tokens to add")] = 64,
    temperature: Annotated[float, typer.Option(help="0 for greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Continue a prompt with an exported student."""
    from linearize.recipes.inspection import continue_prompt

    text = continue_prompt(directory, prompt, max_new_tokens, temperature, seed)
    print(json.dumps({"prompt": prompt, "continuation": text}) if as_json else prompt + text)


@app.command("list")
def list_mixers(as_json: JsonFlag = False) -> None:
    """List the mixers and their options."""
    from linearize.recipes.inspection import mixer_table

    table = mixer_table()
    if as_json:
        print(json.dumps(table))
        return
    for name, entry in table.items():
        print(f"{name:12s} {entry['about']}")
        for option, about in entry["options"].items():
            print(f"    {option:14s} {about['default']!s:>8}  {about['description']}")


@app.command()
def push(
    directory: Directory,
    repo_id: Annotated[str, typer.Argument(help="USER/NAME on the Hub")],
    private: Annotated[bool, typer.Option("--private", help="make the repository private")] = False,
    revision: Annotated[str | None, typer.Option(help="branch to upload to")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list what would be uploaded")] = False,
    force: Annotated[bool, typer.Option("--force", help="upload even if the parity gate fails")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Upload an exported student that passes its gate, with its card."""
    from dataclasses import asdict

    from linearize.convert.hub import push as upload

    result = upload(directory, repo_id, private=private, revision=revision, dry_run=dry_run, force=force)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    for name, size in result.files:
        print(f"{size:>14,}  {name}")
    print("nothing was uploaded (dry run)" if dry_run else f"uploaded to {result.url}")


def _options(pairs: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` pairs; values are read as YAML scalars."""
    import yaml

    options = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise _bad_input(f"--option {pair!r} is not of the form NAME=VALUE")
        options[name] = yaml.safe_load(value)
    return options


def _bad_input(message: str) -> Exception:
    from linearize.convert.errors import ConversionError

    return ConversionError(message)


def _run(application: Callable[..., Any]) -> None:
    """Run a command; bad input is one line on standard error and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import warnings

    from transformers.utils import logging

    from linearize.convert.errors import ConversionError

    warnings.filterwarnings("ignore", module="torch|transformers|peft|accelerate")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        application()
    except ConversionError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        print("stopped; the same command with --resume goes on from here", file=sys.stderr)
        sys.exit(EXIT_STOPPED)


def main() -> None:
    """Entry point of `linearize`."""
    _run(app)


def convert_main() -> None:
    """Entry point of `convert`."""
    _run(convert_app)


if __name__ == "__main__":
    main()
