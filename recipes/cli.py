"""Entry points of the commands `convert` and `linearize`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import linearize.recipes.commands  # noqa: F401  registers every command
from linearize.recipes.commands.app import EXIT_BAD_INPUT, EXIT_STOPPED, app, convert_app


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
