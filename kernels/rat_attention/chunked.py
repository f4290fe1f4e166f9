"""RAT attention in plain torch: the CPU path, differentiable.

The gated running means of keys and values are two gated scans. Attention then takes blocks of queries: each
meets the summaries of earlier chunks as one product, and its own running pair as one more column, in one
softmax. The backward pass recomputes the probabilities from the saved log-sum-exp. Memory and work grow with
T·T / chunk_size, and no more than a block of rows of the probabilities is ever held.

Padding is taken out first: the real tokens of a row move to its front. A row that goes on from a cache has
its own place in the chunk grid.

Shape suffixes: B batch, T time, H query heads, G heads of the running pairs, R query heads that share a pair
(H = G·R), K width, S chunk summaries, Q queries in a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linearize.kernels.gated_scan.chunked import scan_batch
from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.packing import gather_group, group_by_length
from linearize.kernels.rat_attention.cache import RatCache
from linearize.kernels.rat_attention.rotary import rotate

BLOCK = 256


def rat_attention_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    gate_BTHK: Tensor,
    *,
    chunk_size: int,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    cache: RatCache | None = None,
    key_mask_BT: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Same arguments and results as `rat_attention_reference`."""
    options: dict[str, Any] = {
        "chunk_size": chunk_size,
        "position_embeddings": position_embeddings,
        "scale": scale,
    }
    inputs = (q_BTHK, k_BTHK, v_BTHK, gate_BTHK)
    if cu_seqlens is not None:
        return packed(rat_attention_chunked, inputs, cu_seqlens, options)
    if key_mask_BT is not None:
        return unpadded(rat_attention_chunked, inputs, key_mask_BT, cache=cache, **options)
    return rat_rows(inputs, None, cache=cache, **options)


def packed(run: Any, inputs: tuple[Tensor, ...], cu_seqlens: Tensor, options: dict[str, Any]) -> Tensor:
    """Sequences laid end to end: similar lengths go together as one batch, padded on the right."""
    q, _, v, _ = inputs
    if q.shape[1] == 0:
        return q.to(v.dtype, copy=True)
    o_THK = v.new_zeros(q.shape[1:])
    for group in group_by_length(cu_seqlens):
        o = run(*(gather_group(x, group) for x in inputs), **options)
        o_THK = o_THK.index_put((group.index[group.valid],), o[group.valid])
    return o_THK[None]


def unpadded(
    run: Any, inputs: tuple[Tensor, ...], key_mask_BT: Tensor, *, cache: RatCache | None, **options: Any
) -> Tensor:
    """Real tokens at the front of each row, zeros behind them; and the outputs back to where they belong."""
    order_BT = (~key_mask_BT).to(torch.uint8).argsort(dim=1, stable=True)
    lengths_B = key_mask_BT.sum(1)
    behind = torch.arange(key_mask_BT.shape[1], device=key_mask_BT.device) >= lengths_B[:, None]
    fronted = tuple(_take(x, order_BT).masked_fill(behind[..., None, None], 0) for x in inputs)
    o = run(*fronted, **options) if cache is None else rat_rows(fronted, lengths_B, cache=cache, **options)
    rank_BT = (key_mask_BT.long().cumsum(1) - 1).clamp_min(0)
    return _take(o, rank_BT).masked_fill(~key_mask_BT[..., None, None], 0)


def _take(x: Tensor, index_BT: Tensor) -> Tensor:
    """x[b, index[b, t]] for x [B,T,H,K]."""
    return x.gather(1, index_BT[..., None, None].expand(-1, -1, *x.shape[2:]))


def rat_rows(
    inputs: tuple[Tensor, ...],
    lengths_B: Tensor | None,
    *,
    chunk_size: int,
    position_embeddings: tuple[Tensor, Tensor] | None,
    scale: float | None,
    cache: RatCache | None,
) -> Tensor:
    """Rows whose first `lengths` tokens are real (all, if None), going on from the cache if it is not empty."""
    q_BTHK, k_BTHK, v_BTHK, gate_BTHK = inputs
    B, T, H, K = q_BTHK.shape
    C = chunk_size
    scale = K**-0.5 if scale is None else scale
    dtype = compute_dtype(*inputs, None if cache is None else cache.running_key)
    if T == 0 or B == 0:
        return q_BTHK.to(v_BTHK.dtype, copy=True)  # empty, but a part of q's graph
    started = cache is not None and cache.position is not None
    before = cache.length if started and cache is not None else 0  # no row has seen more
    start_B = cache.position if started and cache is not None else None

    # Running pairs; the heads of the one with fewer are shared out.
    old = (cache.running_key, cache.running_value) if started and cache is not None else (None, None)
    running = [
        running_mean(x, gate_BTHK, C, dtype, start_B, state) for x, state in zip((k_BTHK, v_BTHK), old, strict=True)
    ]
    step_T = torch.arange(T, device=q_BTHK.device)
    chunk_BT = (step_T[None] if start_B is None else step_T + start_B[:, None]) // C
    cos, sin = (None, None) if position_embeddings is None else position_embeddings
    if cos is not None and sin is not None:
        cos, sin = cos[chunk_BT][:, :, None], sin[chunk_BT][:, :, None]
    q = rotate(q_BTHK.to(dtype), cos, sin)
    own_k, own_v = (x.transpose(1, 2) for x in (rotate(running[0], cos, sin), running[1]))  # [B,G,T,K]

    S = (before + T) // C
    if start_B is None and lengths_B is None:
        keys, values = (x[:, :, C - 1 :: C] for x in (own_k, own_v))
    else:
        start = torch.zeros(B, dtype=torch.int64, device=q.device) if start_B is None else start_B
        slots = (cache.keys, cache.values) if started and cache is not None else (None, None)
        keys, values = (_slots(x, slot, start, lengths_B, C, S) for x, slot in zip((own_k, own_v), slots, strict=True))
    if cache is not None:
        remember(cache, keys.to(k_BTHK.dtype), values.to(v_BTHK.dtype), running, lengths_B, T)

    G = math.lcm(own_k.shape[1], own_v.shape[1])
    keys, values, own_k, own_v = (_share(x, G) for x in (keys, values, own_k, own_v))
    q_BGRTK = q.view(B, T, G, H // G, K).permute(0, 2, 3, 1, 4)
    lowest = 0 if start_B is not None else None
    o_BGRTK = _Blocks.apply(q_BGRTK, keys, values, own_k, own_v, chunk_BT, before, C, lowest, scale)
    return o_BGRTK.permute(0, 3, 1, 2, 4).reshape(B, T, H, K).to(v_BTHK.dtype)


def running_mean(
    x_BTGK: Tensor, gate_BTHK: Tensor, C: int, dtype: torch.dtype, start_B: Tensor | None, state: Tensor | None
) -> Tensor:
    """The gated scan of keys or values, [B,T,G,K], with G the common multiple of its heads and the gate's."""
    G = math.lcm(x_BTGK.shape[2], gate_BTHK.shape[2])
    x, gate = (t if t.shape[2] == G else t.repeat_interleave(G // t.shape[2], dim=2) for t in (x_BTGK, gate_BTHK))
    return scan_batch(x, gate, C, 0 if start_B is None else start_B, state, dtype)


def _share(x_BGTK: Tensor, heads: int) -> Tensor:
    if x_BGTK.shape[1] == heads:
        return x_BGTK
    return x_BGTK.repeat_interleave(heads // x_BGTK.shape[1], dim=1)


def _slots(
    own_BGTK: Tensor, old_BGSK: Tensor | None, start_B: Tensor, lengths_B: Tensor | None, C: int, S: int
) -> Tensor:
    """The summaries of chunks 0 to S − 1: from the cache, or the running pair at the chunk's last token."""
    B, G, T, K = own_BGTK.shape
    last_BS = (torch.arange(S, device=own_BGTK.device) + 1) * C - 1 - start_B[:, None]  # in these tokens
    end = T if lengths_B is None else lengths_B[:, None]
    index = last_BS.clamp(0, T - 1)[:, None, :, None].expand(-1, G, -1, K)
    summary = own_BGTK.gather(2, index).masked_fill((last_BS >= end)[:, None, :, None], 0)
    if old_BGSK is None or S == 0:
        return summary
    old = old_BGSK[:, :, :S].to(own_BGTK.dtype)
    if old.shape[2] < S:
        old = torch.cat([old, old.new_zeros(B, G, S - old.shape[2], K)], dim=2)
    return torch.where((last_BS < 0)[:, None, :, None], old, summary)


def remember(
    cache: RatCache, keys: Tensor, values: Tensor, running: list[Tensor], lengths_B: Tensor | None, T: int
) -> None:
    """Put what the row has seen into the cache; tensors are replaced, so gradients flow through them."""
    slots = cache.slots
    pair = [x[:, -1] for x in running]
    if lengths_B is not None:
        last = (lengths_B - 1).clamp_min(0)[:, None]
        old = (cache.running_key, cache.running_value)
        none = (lengths_B == 0)[:, None, None]
        pair = [
            torch.where(none, torch.zeros_like(x[:, 0]) if before is None else before, _take(x, last)[:, 0])
            for x, before in zip(running, old, strict=True)
        ]
    seen: Tensor | int = T if lengths_B is None else lengths_B
    B = keys.shape[0]
    earlier = torch.zeros(B, dtype=torch.int64, device=keys.device) if cache.position is None else cache.position
    cache.position = earlier + seen
    cache.keys, cache.values = keys, values
    cache.running_key, cache.running_value = pair
    cache.length += T
    cache.grow(slots)  # room once reserved stays


class _Blocks(torch.autograd.Function):
    """q [B,G,R,T,K], summaries [B,G,S,K], own pairs [B,G,T,K], chunk of each query [B or 1,T] -> [B,G,R,T,K].

    `before` tokens at most came earlier, which bounds the chunks in reach of a block of queries; from
    summary `lowest` on (by default the block's own first chunk) it is decided query by query.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        chunk: Tensor,
        before: int,
        C: int,
        lowest: int | None,
        scale: float,
    ) -> Tensor:
        o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[:-1])
        ctx.options = (before, C, lowest, scale)
        for rows, n, q_BGXK, s, own in _logits(q, keys, own_k, chunk, ctx.options):
            top = own if n == 0 else torch.maximum(own, s.amax(-1))
            p, p_own = s.sub_(top[..., None]).exp_(), (own - top).exp_()
            total = p.sum(-1) + p_own
            block = (p.view(*q_BGXK.shape[:-1], n) @ values[:, :, :n]).view(*own.shape, -1)
            block.addcmul_(p_own[..., None], own_v[:, :, None, rows])
            o[..., rows, :] = block.div_(total[..., None])
            lse[..., rows] = top + total.log()
        ctx.save_for_backward(q, keys, values, own_k, own_v, chunk, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, own_k, own_v, chunk, o, lse = ctx.saved_tensors
        scale: float = ctx.options[3]
        dq = torch.empty_like(o)
        dkeys, dvalues, down_k, down_v = (
            torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (keys, values, own_k, own_v)
        )
        delta = (do * o).sum(-1)
        for rows, n, q_BGXK, s, own in _logits(q, keys, own_k, chunk, ctx.options):
            q_rows, do_rows = q[..., rows, :], do[..., rows, :]
            k_rows, v_rows = own_k[:, :, None, rows], own_v[:, :, None, rows]
            p, p_own = s.sub_(lse[..., rows, None]).exp_(), (own - lse[..., rows]).exp_()
            ds_own = ((do_rows * v_rows).sum(-1) - delta[..., rows]).mul_(p_own).mul_(scale)
            down_v[:, :, rows] = (p_own[..., None] * do_rows).sum(2)
            down_k[:, :, rows] = (ds_own[..., None] * q_rows).sum(2)
            dq_rows = ds_own[..., None] * k_rows
            if n > 0:
                do_BGXK = do_rows.reshape(q_BGXK.shape)
                dvalues[:, :, :n] += p.view(*q_BGXK.shape[:-1], n).mT @ do_BGXK
                ds = (do_BGXK @ values[:, :, :n].mT).view(p.shape)
                ds.sub_(delta[..., rows, None]).mul_(p).mul_(scale)
                ds_BGXS = ds.view(*q_BGXK.shape[:-1], n)
                dkeys[:, :, :n] += ds_BGXS.mT @ q_BGXK
                dq_rows = dq_rows + (ds_BGXS @ keys[:, :, :n]).view(dq_rows.shape)
            dq[..., rows, :] = dq_rows
        return dq, dkeys, dvalues, down_k, down_v, None, None, None, None, None


def _logits(
    q: Tensor, keys: Tensor, own_k: Tensor, chunk: Tensor, options: tuple[int, int, int | None, float]
) -> Iterator[tuple[slice, int, Tensor, Tensor, Tensor]]:
    """Blocks of queries: rows, summaries in reach n, queries [B,G,R·Q,K], logits of those [B,G,R,Q,n] with −inf
    where hidden, logits of the own pairs [B,G,R,Q]."""
    before, C, lowest, scale = options
    B, G, R, T, K = q.shape
    for first in range(0, T, BLOCK):
        rows = slice(first, min(first + BLOCK, T))
        n = min(keys.shape[2], (before + rows.stop - 1) // C)
        q_rows = q[..., rows, :]
        q_BGXK = q_rows.reshape(B, G, -1, K)
        s = (q_BGXK @ keys[:, :, :n].mT).mul_(scale).view(B, G, R, rows.stop - rows.start, n)
        partly = first // C if lowest is None else lowest
        if partly < n:
            slot = torch.arange(partly, n, device=q.device)
            s[..., partly:].masked_fill_((slot >= chunk[:, rows, None])[:, None, None], float("-inf"))
        yield rows, n, q_BGXK, s, (q_rows * own_k[:, :, None, rows]).sum(-1).mul_(scale)
