"""What all commands share: the typer applications, arguments that recur, exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_STOPPED = 1, 2, 130

app = typer.Typer(
    name="linearize", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Turn a pretrained softmax Transformer into a fast linear-time one.",
)  # fmt: skip
convert_app = typer.Typer(name="convert", add_completion=False, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, help="Measure kernels and mixers; each prints and stores a table.")
app.add_typer(bench_app, name="bench")

Directory = Annotated[Path, typer.Argument(help="an exported student")]
JsonFlag = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` pairs; values are read as YAML scalars."""
    import yaml

    options = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise bad_input(f"--option {pair!r} is not of the form NAME=VALUE")
        options[name] = yaml.safe_load(value)
    return options


def bad_input(message: str) -> Exception:
    """The error that `main` prints as one line, with exit code 2."""
    from linearize.convert.errors import ConversionError

    return ConversionError(message)
