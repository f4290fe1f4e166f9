"""`linearize bench training`: speed and memory of the stages' steps, and where their time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from linearize.recipes.commands.app import JsonFlag, bad_input, bench_app, parse_options


@bench_app.command("training")
def bench_training(
    shape: Annotated[str, typer.Option(help="tiny, 1b, 3b or 8b (a random Llama), or a model folder or Hub id")] = "1b",
    to: Annotated[str, typer.Option(help="mixer, or a plan")] = "rodimus",
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of the mixer", show_default=False)] = None,
    context: Annotated[int, typer.Option(min=2, help="tokens per sequence")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="sequences per step")] = 8,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes a GPU when there is one")] = "auto",
    rows: Annotated[str | None, typer.Option(help="steps to measure, divided by commas; default all")] = None,
    steps: Annotated[int, typer.Option(min=1, help="timed steps of each")] = 8,
    compile: Annotated[bool, typer.Option("--compile", help="run mixers, attention and MLPs through torch.compile")] = False,
    profile: Annotated[bool, typer.Option(help="profile one step of each, and time parts of a layer")] = True,
    out: Annotated[Path | None, typer.Option(help="where to store everything, as JSON")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Time the transfer and lora stages and whole models, against the measured matrix rate."""
    import torch

    from linearize.distill.benchmarks import Settings, report_json, report_text
    from linearize.distill.benchmarks import bench_training as run
    from linearize.distill.device import choose_device
    from linearize.distill.progress import say

    dtypes = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
    if dtype not in dtypes:
        raise bad_input(f"--dtype {dtype!r} is not one of {', '.join(dtypes)}")
    settings = Settings(
        teacher=shape,
        to=to,
        options=parse_options(option or []),
        context=context,
        batch_size=batch_size,
        dtype=dtypes[dtype],
        device=choose_device(device),
        rows=tuple(name.strip() for name in rows.split(",")) if rows else (),
        steps=steps,
        compile=compile,
        profile=profile,
        parts=profile,
    )
    report = run(settings, say)
    found = json.dumps(report_json(report), indent=1)
    if out is not None:
        out.write_text(found + "\n")
    print(found if as_json else report_text(report))
