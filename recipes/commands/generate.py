"""`linearize generate DIR PROMPT`: try a student out."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from linearize.recipes.commands.app import Directory, JsonFlag, app


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
