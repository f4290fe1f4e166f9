"""Where work runs."""

from __future__ import annotations

import torch


def choose_device(name: str = "auto") -> str:
    """`name` as it is; for "auto" a GPU when there is one, else the CPU."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
