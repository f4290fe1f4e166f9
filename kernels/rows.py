"""How kernels that work on a tensor's rows share them out among programs."""

from __future__ import annotations

from dataclasses import dataclass

_ELEMENTS = 2048
"""Elements of a tile: sixteen per thread of four warps."""

_PROGRAMS = 2112
"""Programs that sum over rows: sixteen for each of the 132 multiprocessors of an H100 or H200."""


@dataclass(frozen=True)
class Tiles:
    """`programs` take tiles of `rows` rows in turn, `count` tiles each, the last ones beyond the end."""

    rows: int
    programs: int
    count: int
    warps: int


def tiles(rows: int, width: int, columns: int, *, summed: bool = False, share: int = 1) -> Tiles:
    """Tiles of `rows` rows that are `width` (a power of two) wide, for each of `columns` heads or column blocks.

    A program takes one tile, or several where it has sums over rows to keep (`summed`). How many depends on the shape
    alone, so that the sums over programs' sums come out the same on every GPU. A kernel that holds much per element takes
    a `share`-th of the usual tile, or its registers spill.
    """
    tall = max(1, min(_ELEMENTS // share // width, 64))
    total = -(-rows // tall)
    programs = max(1, min(total, _PROGRAMS // columns)) if summed else total
    warps = 4 if width <= _ELEMENTS else min(32, 4 * width // _ELEMENTS)
    return Tiles(tall, programs, -(-total // programs), warps)
