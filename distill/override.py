"""A method of one module replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def override(module: nn.Module, method: str, function: Callable[..., Any]) -> Iterator[None]:
    """Context: `module.method` is `function`; then again what it was, an override's too."""
    own = vars(module).get(method)
    module.__dict__[method] = function
    try:
        yield
    finally:
        del module.__dict__[method]
        if own is not None:
            module.__dict__[method] = own
