"""Where a number that is not finite came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def first_nonfinite(module: nn.Module, run: Callable[[], Any]) -> str | None:
    """Run again, and name the first module inside `module` that makes a NaN or an infinity; None if none does.

    Modules finish before those that they are part of, so the name is that of a layer, not of the whole.
    """
    found: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not found and torch.is_tensor(first) and first.is_floating_point() and not first.isfinite().all():
                found.append(name)

        return look

    handles = [child.register_forward_hook(hook(name)) for name, child in module.named_modules() if name]
    try:
        # A compiled part does not see hooks that came later.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
