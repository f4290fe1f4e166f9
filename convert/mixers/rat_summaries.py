"""Softmax over chunk summaries and exact keys together: the attention of `rat`, in plain torch.

Every row has its own chunk grid, which counts real tokens only. A query at position t sees, in one softmax,

    with a window W:  the keys of positions s_t .. t,  s_t = ⌊(t - W + 1) / C⌋ · C, and the summaries before s_t
    without:          the summaries of all earlier chunks, and the running pair of its own chunk

s_t starts a chunk, so that every key is seen once, by itself or through its chunk, and where a key counts depends on
positions alone: prefill and decoding agree. The window holds W to W + C - 1 keys.

Shape suffixes: B batch, T queries, S summaries, L earlier keys, G kv heads, R query heads per kv head, K width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

BLOCK = 256
"""Queries whose logits are held at a time."""


@dataclass(frozen=True)
class Grid:
    """Where the queries stand.

    Attributes:
        position: `[B, T]` among the real tokens of the own sequence; negative at the padding before it.
        aligned: whether every row's first token starts a chunk.
        before: how many tokens came earlier, padding included.
        chunk: C, tokens that share a summary.
        window: W, exact keys a query sees at least; 0 for none.
        reach: how many positions a query sees in all; None for no limit (the teacher's sliding window).
    """

    position: torch.Tensor
    aligned: bool
    before: int
    chunk: int
    window: int
    reach: int | None

    @property
    def earlier(self) -> int:
        """L, exact keys that must be kept of earlier tokens."""
        return earlier_keys(self.window, self.chunk)

    def first_exact(self, position: torch.Tensor) -> torch.Tensor:
        """s_t; the chunk's own start without a window, whose summaries are those before it as well."""
        first = position - self.window + 1 if self.window else position
        return first.div(self.chunk, rounding_mode="floor").clamp_min(0) * self.chunk


def earlier_keys(window: int, chunk: int) -> int:
    """Exact keys of earlier tokens that a later query may see."""
    return window + chunk - 2 if window else 0


def summary_attention(
    q: torch.Tensor,
    summaries: torch.Tensor,
    near: torch.Tensor,
    weight: torch.Tensor,
    grid: Grid,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Heads `[B, T, H, K]` float32; memory grows with a block's logits only, also for the backward pass.

    Args:
        q: `[B, T, H, K]`.
        summaries: `[B, S, G, 2K]` key and value of each chunk from the first on; those unfinished are not read.
        near: `[B, L + T, G, 2K]` keys and values of the earlier and the present tokens; without a window
            `[B, T, G, 2K]`, the running pair at each token.
        weight: `[H]` added to the logits of summaries.
    """
    tokens = q.shape[1]
    blocks = []
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        seen = min(summaries.shape[1], (grid.before + end) // grid.chunk)
        keys = near[:, start : end + grid.earlier]
        arguments = (q[:, start:end], summaries[:, :seen], keys, weight, grid.position[:, start:end])
        if torch.is_grad_enabled():
            block = checkpoint(_block, *arguments, grid, scale, softcap, use_reentrant=False)
        else:
            block = _block(*arguments, grid, scale, softcap)
        blocks.append(block)
    return torch.cat(blocks, 1).flatten(2, 3)


def _block(
    q: torch.Tensor,
    summaries: torch.Tensor,
    near: torch.Tensor,
    weight: torch.Tensor,
    position: torch.Tensor,
    grid: Grid,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """One block of `summary_attention`: `[B, T, G, R, K]`."""
    groups = near.shape[2]
    q = q.float().unflatten(2, (groups, -1))
    (far_k, far_v), (near_k, near_v) = (x.float().chunk(2, -1) for x in (summaries, near))
    far = torch.einsum("btgrk,bsgk->btgrs", q, far_k) * scale
    if grid.window:
        close = torch.einsum("btgrk,blgk->btgrl", q, near_k) * scale
    else:
        close = torch.einsum("btgrk,btgk->btgr", q, near_k)[..., None] * scale
    if softcap is not None:
        far, close = (softcap * torch.tanh(x / softcap) for x in (far, close))
    far = far + weight.view(groups, -1, 1)
    far = far.masked_fill(~_visible_summaries(position, summaries.shape[1], grid)[:, :, None, None], -torch.inf)
    if grid.window:
        close = close.masked_fill(~_visible_keys(position, near.shape[1], grid)[:, :, None, None], -torch.inf)
    far_p, close_p = torch.cat([far, close], -1).softmax(-1).split([far.shape[-1], close.shape[-1]], -1)
    y = torch.einsum("btgrs,bsgk->btgrk", far_p, far_v)
    if grid.window:
        return y + torch.einsum("btgrl,blgk->btgrk", close_p, near_v)
    return y + close_p * near_v[:, :, :, None]


def _visible_summaries(position: torch.Tensor, count: int, grid: Grid) -> torch.Tensor:
    """`[B, T, S]`: chunks that end before the exact keys, within reach."""
    end = (torch.arange(count, device=position.device) + 1) * grid.chunk
    visible = end <= grid.first_exact(position)[..., None]
    if grid.reach is not None:
        visible = visible & (end > position[..., None] - grid.reach + 1)
    return visible


def _visible_keys(position: torch.Tensor, count: int, grid: Grid) -> torch.Tensor:
    """`[B, T, L + T]`: exact keys from s_t to the own one, within reach; padding sees itself."""
    key = position[:, :1, None] - grid.earlier + torch.arange(count, device=position.device)
    query = position[..., None]
    visible = (key >= grid.first_exact(query)) & (key < query)
    if grid.reach is not None:
        visible = visible & (key > query - grid.reach)
    return visible | (key == query)
