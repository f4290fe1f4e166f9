"""What RAT attention remembers of the tokens it has seen: a slot per chunk and the running pair."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

_MIN_SLOTS = 16


@dataclass
class RatCache:
    """The cache of one layer: empty at first, filled by `rat_attention` and `rat_attention_step`.

    Attributes:
        chunk_size: of the layer.
        keys, values: [B, G, S, K] the key, turned by its chunk's rotary position, and the value of every
            finished chunk, in slots by chunk number; slots from the current chunk on are spare room. None
            while empty.
        running_key, running_value: [B, G, K] the running pair of the current chunk in float32 (or float64),
            the key not turned.
        position: [B] int64, how many tokens each row has seen.
        length: the largest number of tokens a row can have seen, padding included: known without asking the
            device.
        fixed: whether every step reads all slots, so that its shapes never change (see `reserve`).
    """

    chunk_size: int
    keys: Tensor | None = None
    values: Tensor | None = None
    running_key: Tensor | None = None
    running_value: Tensor | None = None
    position: Tensor | None = None
    length: int = 0
    fixed: bool = False

    @property
    def slots(self) -> int:
        """How many slots there is room for."""
        return 0 if self.keys is None else self.keys.shape[2]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in all, for good: no step up to there moves or reshapes a tensor.

        This is what capturing a step as a CUDA graph needs; a replay moves `position` but can't count `length`, so
        add to that after each. The cache must not be empty.
        """
        if self.keys is None:
            raise ValueError("RatCache.reserve: the cache is empty; run rat_attention with it first")
        self.grow(-(-tokens // self.chunk_size))
        self.fixed = True

    def grow(self, slots: int) -> None:
        """Have at least `slots` slots."""
        if self.keys is None or self.values is None or slots <= self.slots:
            return
        self.keys, self.values = (_with_room(x, slots) for x in (self.keys, self.values))

    def grow_for_next(self) -> None:
        """Have a slot for the next token's chunk; twice as many as now where there is none."""
        needed = self.length // self.chunk_size + 1
        if needed > self.slots:
            if self.fixed:
                raise ValueError(
                    f"rat_attention_step: the cache was reserved for {self.slots * self.chunk_size} tokens and is "
                    "full; reserve more"
                )
            self.grow(max(needed, 2 * self.slots, _MIN_SLOTS))

    def rows(self, index: Tensor) -> RatCache:
        """A cache of copies of the rows in `index` [n]: reordered, repeated or dropped, as beam search does."""
        names = [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]
        return replace(self, **{name: getattr(self, name).index_select(0, index) for name in names})


def _with_room(x_BGSK: Tensor, slots: int) -> Tensor:
    B, G, S, K = x_BGSK.shape
    return torch.cat([x_BGSK, x_BGSK.new_zeros(B, G, slots - S, K)], dim=2)
