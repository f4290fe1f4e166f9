"""What `rat` keeps of earlier tokens: a slot per chunk, and the window's keys as a ring.

Every row has its own chunk grid, which counts real tokens only: where a key counts depends on positions alone, so
that prefill and decoding agree. Pairs are a key and a value side by side, `[..., 2K]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FEWEST_SLOTS = 16


@dataclass(frozen=True)
class Grid:
    """Where the tokens stand.

    Attributes:
        first: `[B]` position of the first token among the real ones of its row; less than 0 at padding before it.
        tokens: T.
        before: how many tokens came earlier, padding included.
        aligned: whether every row's first token is position 0, for certain.
        chunk: C, tokens that share a summary.
        window: W, exact keys a token sees at least; 0 for none.
    """

    first: torch.Tensor
    tokens: int
    before: int
    aligned: bool
    chunk: int
    window: int

    @property
    def position(self) -> torch.Tensor:
        """`[B, T]`."""
        return self.first[:, None] + torch.arange(self.tokens, device=self.first.device)

    @property
    def seen(self) -> torch.Tensor:
        """`[B]` how many real tokens each row has seen with these."""
        return (self.first + self.tokens).clamp_min(0)


def ring_size(window: int, chunk: int) -> int:
    """The most exact keys a token sees."""
    return window + chunk - 1 if window else 0


def slot_count(tokens: int, chunk: int) -> int:
    """Slots for the chunks of `tokens` tokens: a power of two, so that decoding seldom makes them anew."""
    return max(FEWEST_SLOTS, 1 << (tokens // chunk).bit_length())


def chunk_slots(summary: torch.Tensor, grid: Grid, old: torch.Tensor | None) -> torch.Tensor:
    """Pairs `[B, S, G, 2K]` at the ends of chunks, with room for more, of running pairs `[B, T, G, 2K]`."""
    count = slot_count(grid.before + grid.tokens, grid.chunk)
    if grid.aligned:
        last = summary[:, grid.chunk - 1 :: grid.chunk]
        return torch.cat([last, last.new_zeros(len(last), count - last.shape[1], *last.shape[2:])], 1)
    if grid.tokens == 1 and old is not None and old.shape[1] == count and not torch.is_grad_enabled():
        # One token of decoding writes its pair in place: the slot counts from the chunk's last token on.
        slot = grid.first.clamp_min(0) // grid.chunk
        old[torch.arange(len(old), device=old.device), slot.clamp_max(count - 1)] = summary[:, 0]
        return old
    last = (torch.arange(count, device=summary.device) + 1) * grid.chunk - 1 - grid.first[:, None]
    index = last.clamp(0, grid.tokens - 1)[..., None, None].expand(-1, -1, *summary.shape[2:])
    new = summary.gather(1, index)
    if old is None:
        return new
    old = torch.cat([old, old.new_zeros(len(old), count - old.shape[1], *old.shape[2:])], 1)
    return torch.where((last < 0)[..., None, None], old, new)


def with_earlier(
    k: torch.Tensor, v: torch.Tensor, grid: Grid, ring: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and values `[B, S, G, K]` with the ring's before them, and where position 0 is among the S (None: first)."""
    if grid.aligned:
        return k, v, None
    earlier = 0
    if ring is not None:
        earlier = ring.shape[1] - 1
        token = grid.first[:, None] - earlier + torch.arange(earlier, device=ring.device)
        old = ring[torch.arange(len(ring), device=ring.device)[:, None], token % ring.shape[1]]
        old_k, old_v = old.chunk(2, -1)
        k, v = torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)
    return k, v, earlier - grid.first


def ring_of(k: torch.Tensor, v: torch.Tensor, grid: Grid, origin: torch.Tensor | None) -> torch.Tensor:
    """The ring `[B, L, G, 2K]` after these tokens: the token at position p in slot p mod L."""
    slots = ring_size(grid.window, grid.chunk)
    slot = torch.arange(slots, device=k.device)
    newest = grid.seen[:, None] - 1
    place = newest - (newest - slot) % slots
    if origin is not None:
        place = place + origin[:, None]
    index = place.clamp(0, k.shape[1] - 1)[..., None, None].expand(-1, -1, *k.shape[2:])
    return torch.cat([k.gather(1, index), v.gather(1, index)], -1)
