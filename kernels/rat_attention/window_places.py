"""Which keys and which chunk summaries each query of RAT with a window sees: ranges, the same for every path.

Key j of the S stands at position p = j − origin of its row, negative at padding; query t is key S − T + t. With
a window of W tokens and chunks of C

    s_p = ⌊(p − W + 1) / C⌋ · C, at least 0      (without a window: ⌊p / C⌋ · C)

a query sees the keys of positions s_p .. p (without a window its own alone) and the summaries of the chunks that end
before s_p, both no farther back than `reach`. All ranges only ever move forward with t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Half-open ranges, each [B or 1, T] int32.

    Attributes:
        first: the first of the S keys that a query sees; the last is its own. Behind its own where it sees none.
        low, high: the summaries it sees.
        keys: S.
        width: the most keys a query sees.
    """

    first: Tensor
    low: Tensor
    high: Tensor
    keys: int
    width: int


def places(
    T: int, S: int, window: int, chunk_size: int, origin: Tensor | None, reach: int | None, device: torch.device
) -> Places:
    """Arguments as `rat_window_attention`."""
    C = chunk_size
    key = torch.arange(S - T, S, device=device)[None]
    start = 0 if origin is None else origin[:, None]
    position = key - start
    exact_from = ((position - window + 1 if window else position) // C * C).clamp_min(0)
    first = exact_from + start if window else torch.where(position < 0, key + 1, key)
    low = torch.zeros_like(position)
    if reach is not None:
        first = torch.maximum(first, key - reach + 1)
        low = (position - reach + 1).clamp_min(0) // C
    width = min(window + C - 1, S) if window else 1
    first, low, high = (x.clamp_min(0).to(torch.int32) for x in (first, low, exact_from // C))
    return Places(first, low, high, S, width)
