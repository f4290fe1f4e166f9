"""`linearize bench mqar`: associative recall of small models trained from nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from linearize.recipes.commands.app import JsonFlag, bad_input, bench_app


@bench_app.command("mqar")
def bench_mqar(
    mixers: Annotated[str | None, typer.Option(help="names, divided by commas; default all")] = None,
    steps: Annotated[int, typer.Option(min=1, help="training steps at each learning rate")] = 4_000,
    batch_size: Annotated[int, typer.Option(min=1, help="sequences per step")] = 64,
    window: Annotated[int, typer.Option(min=0, help="softmax window beside the recurrences; 0 for none")] = 0,
    conv: Annotated[int, typer.Option(min=0, help="taps of a convolution behind the embedding; 0 for none")] = 4,
    vocabulary: Annotated[int, typer.Option(help="tokens")] = 8_192,
    length: Annotated[int, typer.Option(help="tokens of a sequence")] = 256,
    pairs: Annotated[str, typer.Option(help="numbers of pairs to measure, divided by commas")] = "16,32,64",
    width: Annotated[int, typer.Option(help="of the model")] = 128,
    learning_rates: Annotated[str, typer.Option(help="each is tried until one is enough")] = "3e-3,1e-3",
    seed: Annotated[int, typer.Option(help="of weights and sequences")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes a GPU when there is one")] = "auto",
    jobs: Annotated[int, typer.Option(min=1, help="mixers trained at a time, each in a process of its own")] = 1,
    bfloat16: Annotated[bool, typer.Option("--bfloat16", help="multiply matrices in bfloat16")] = False,
    out: Annotated[Path, typer.Option(help="where results are kept; those in it are not run again")] = Path(
        "bench-mqar.json"
    ),
    as_json: JsonFlag = False,
) -> None:
    """Train a small model per mixer on multi-query associative recall and print their accuracy."""
    from linearize.distill.evaluate.mqar import Task
    from linearize.distill.evaluate.mqar_training import Training, mqar_table
    from linearize.recipes.mqar_bench import bench_mqar as run

    names = [name.strip() for name in mixers.split(",")] if mixers else []
    try:
        counts, rates = tuple(map(int, pairs.split(","))), tuple(map(float, learning_rates.split(",")))
        task = Task(vocabulary, length, counts, tuple(n for n in (4, 8) if n < min(counts)))
    except ValueError as error:
        raise bad_input(f"bench mqar: {error}") from None
    training = Training(
        width=width,
        window=window,
        conv=conv,
        steps=steps,
        batch_size=batch_size,
        learning_rates=rates,
        seed=seed,
        bfloat16=bfloat16,
    )
    outcomes = run(names, task, training, device, out, jobs)
    print(json.dumps([outcome.to_json() for outcome in outcomes]) if as_json else mqar_table(outcomes))
