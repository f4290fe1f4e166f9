"""`linearize eval DIR`: what a student kept of its teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from linearize.recipes.commands.app import Directory, JsonFlag, app, bad_input


@app.command("eval")
def evaluate(
    directory: Directory,
    teacher: Annotated[str | None, typer.Option(help="default: the one the student's record names")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="what to measure, by commas: language, positions, branches, state, mqar, needle, retrieval, speed, all, "
            "and standard tasks such as arc_easy, piqa; default: all but retrieval"
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="text to measure on; default what conversion held out")] = None,
    retrieval: Annotated[Path | None, typer.Option(help="JSONL with context and continuation, or answer")] = None,
    tasks_data: Annotated[Path | None, typer.Option(help="folder of JSONL for standard tasks, offline")] = None,
    tokens: Annotated[str, typer.Option(help="held-out tokens for perplexity and KL")] = "16384",
    context: Annotated[int, typer.Option(min=2, help="tokens of one sequence")] = 1024,
    positions: Annotated[str, typer.Option(help="length of the texts for perplexity by position")] = "4096",
    lengths: Annotated[str, typer.Option(help="lengths of the needle grid")] = "256,512,1024",
    samples: Annotated[int, typer.Option(min=1, help="needles per cell")] = 4,
    speed_contexts: Annotated[str, typer.Option(help="contexts of the speed measurement")] = "256,1024,4096",
    limit: Annotated[int | None, typer.Option(min=1, help="questions per standard task or retrieval file")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="sequences at a time")] = 4,
    seed: Annotated[int, typer.Option(help="of everything random")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default a GPU when there is one")] = "auto",
    date: Annotated[str | None, typer.Option(help="kept with the result; default none")] = None,
    save: Annotated[bool, typer.Option(help="write evaluation.json beside the student")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Measure an exported student against its teacher."""
    from linearize.distill.evaluate.suite import QUESTIONS, Settings
    from linearize.recipes.evaluation import evaluate_directory
    from linearize.recipes.schema import parse_tokens

    names = tuple(name.strip() for name in (tasks or "all").split(",") if name.strip())
    default = (*QUESTIONS, "retrieval") if retrieval is not None else QUESTIONS
    questions = tuple(question for name in names for question in (default if name == "all" else (name,)))
    settings = Settings(
        tokens=parse_tokens(tokens),
        context=context,
        positions=parse_tokens(positions),
        needle_lengths=_integers(lengths, "--lengths"),
        needle_samples=samples,
        speed_contexts=_integers(speed_contexts, "--speed-contexts"),
        limit=limit,
        batch_size=batch_size,
        seed=seed,
    )
    result = evaluate_directory(
        directory, teacher, questions, settings, data, retrieval, tasks_data, device, date
    )  # fmt: skip
    if save:
        result.save(directory)
    print(json.dumps(result.to_json(), sort_keys=True) if as_json else result.to_text())


def _integers(text: str, option: str) -> tuple[int, ...]:
    from linearize.recipes.schema import parse_tokens

    values = tuple(parse_tokens(part) for part in text.split(",") if part.strip())
    if not values or min(values) < 1:
        raise bad_input(f"{option} {text!r}: give lengths of one token or more, by commas, such as 256,1k")
    return values
