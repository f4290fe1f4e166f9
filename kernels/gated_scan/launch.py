"""Launch configurations of the gated scan on the GPU. `tune.py` measures candidates; nothing is tuned at start-up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Elements of the state in a program, and its warps."""

    elements: int
    warps: int


TABLE: dict[str, Launch] = {"forward": Launch(1024, 4), "backward": Launch(1024, 4)}
