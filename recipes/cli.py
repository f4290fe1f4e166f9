"""Entry points of the commands `convert` and `linearize`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import linearize.recipes.commands  # noqa: F401  registers every command
from linearize.recipes.commands.app import EXIT_BAD_INPUT, EXIT_STOPPED, app, convert_app

QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # DDP's remark that every parameter was used
}
"""Set before the libraries are imported, which a command does when it needs them: `--help` does not."""


def _run(application: Callable[..., Any]) -> None:
    """Run a command; bad input is one line on standard error and exit code 2."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", module="torch|transformers|peft|accelerate")
    try:
        application()
    except KeyboardInterrupt:
        print("stopped; the same command with --resume goes on from here", file=sys.stderr)
        sys.exit(EXIT_STOPPED)
    except Exception as error:
        errors = sys.modules.get("linearize.convert.errors")
        if errors is None or not isinstance(error, errors.ConversionError):
            raise
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


def main() -> None:
    """Entry point of `linearize`."""
    _run(app)


def convert_main() -> None:
    """Entry point of `convert`."""
    _run(convert_app)


if __name__ == "__main__":
    main()
