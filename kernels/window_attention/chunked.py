"""Window attention in blocks of queries, in plain torch: the CPU path, differentiable.

Each block of queries meets only the slice of keys its window can reach (and the sinks), so memory and work
grow with T·(window + block) and never with T·T. The backward pass recomputes the probabilities from the
saved log-sum-exp.

Shape suffixes: B batch, T queries, S keys, H query heads, G query heads per key (or value) head, K key
width, V value width, Q queries in a block, L keys in reach of a block, N sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linearize.kernels.packing import gather_group, group_by_length

MAX_BLOCK = 256
MIN_BLOCK = 32


@dataclass(frozen=True)
class _Options:
    window: int
    sinks: int
    scale: float
    softcap: float | None


def window_attention_chunked(
    q_BTHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    key_mask_BS: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `window_attention_reference`."""
    scale = q_BTHK.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens is not None and q_BTHK.shape[1] > 0:
        return _packed(q_BTHK, k_BSHK, v_BSHV, _Options(window, sinks, scale, softcap), cu_seqlens)
    dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
    q, k, v = (x.to(dtype).transpose(1, 2).contiguous() for x in (q_BTHK, k_BSHK, v_BSHV))
    o_BHTV, lse_BHT = _Blocks.apply(q, k, v, key_mask_BS, _Options(window, sinks, scale, softcap))
    return o_BHTV.transpose(1, 2).to(v_BSHV.dtype), lse_BHT.transpose(1, 2)


def _packed(
    q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, options: _Options, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Sequences laid end to end: similar lengths go together as one batch, padded on the right."""
    T, H, V = q_BTHK.shape[1], q_BTHK.shape[2], v_BSHV.shape[3]
    o_THV = v_BSHV.new_zeros(T, H, V)
    lse_TH = torch.zeros(T, H, dtype=torch.promote_types(q_BTHK.dtype, torch.float32), device=q_BTHK.device)
    for group in group_by_length(cu_seqlens):
        o, lse = window_attention_chunked(
            *(gather_group(x, group) for x in (q_BTHK, k_BSHK, v_BSHV)),
            window=options.window,
            sinks=options.sinks,
            scale=options.scale,
            softcap=options.softcap,
        )
        rows = (group.index[group.valid],)
        o_THV, lse_TH = o_THV.index_put(rows, o[group.valid]), lse_TH.index_put(rows, lse[group.valid])
    return o_THV[None], lse_TH[None]


class _Blocks(torch.autograd.Function):
    """q [B,H,T,K], k [B,Hk,S,K], v [B,Hv,S,V], contiguous, float32 or float64; key mask [B,S] or None."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, options: _Options
    ) -> tuple[Tensor, Tensor]:
        B, H, T, _ = q.shape
        o, lse = q.new_zeros(B, H, T, v.shape[-1]), q.new_full((B, H, T), float("-inf"))
        for block in _blocks(q, k, key_mask, options):
            logits_BHQL, _ = _logits(q, k, block, options)
            top_BHQ1 = logits_BHQL.amax(-1, keepdim=True).clamp_min_(torch.finfo(q.dtype).min)
            p = logits_BHQL.sub_(top_BHQ1).exp_()
            total_BHQ1 = p.sum(-1, keepdim=True)
            rows = block.queries
            lse[:, :, rows] = (top_BHQ1 + total_BHQ1.log())[..., 0]
            o_BHQV = _grouped(p, _take(v, block))
            o[:, :, rows] = o_BHQV.div_(total_BHQ1.clamp_min_(torch.finfo(q.dtype).tiny))
        ctx.save_for_backward(q, k, v, key_mask, o, lse)
        ctx.options = options
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, o, lse = ctx.saved_tensors
        options: _Options = ctx.options
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        # d logit_ij = p_ij (do_i·v_j − delta_i): softmax's and log-sum-exp's terms in one number.
        delta = (do * o).sum(-1) - dlse
        empty = lse == float("-inf")
        delta = delta.masked_fill(empty, 0)
        lse = lse.masked_fill(empty, 0)
        for block in _blocks(q, k, key_mask, options):
            rows = block.queries
            p, slope = _logits(q, k, block, options)
            p = p.sub_(lse[:, :, rows, None]).exp_()
            do_BHQV = do[:, :, rows]
            _put(dv, block, _grouped_transposed(p, do_BHQV, v.shape[1]))
            ds = _grouped(do_BHQV, _take(v, block).mT).sub_(delta[:, :, rows, None]).mul_(p)
            if slope is not None:
                ds.mul_(slope)
            ds.mul_(options.scale)
            dq[:, :, rows] = _grouped(ds, _take(k, block))
            _put(dk, block, _grouped_transposed(ds, q[:, :, rows], k.shape[1]))
        return dq, dk, dv, None, None


@dataclass(frozen=True)
class _Block:
    """A block of queries and the keys in its reach.

    Attributes:
        queries: rows of the block.
        keys: contiguous range of keys that its windows cover.
        sinks: [B or 1, N] key positions of sinks, given as extra columns before the range, or None.
        hidden: [B or 1, 1, Q, N + L] which of those columns a query must not see.
    """

    queries: slice
    keys: slice
    sinks: Tensor | None
    hidden: Tensor


def _blocks(q: Tensor, k: Tensor, key_mask: Tensor | None, options: _Options) -> Iterator[_Block]:
    T, S, W = q.shape[2], k.shape[2], options.window
    size = max(MIN_BLOCK, min(MAX_BLOCK, 1 << (min(W, T) - 1).bit_length())) if T else MIN_BLOCK
    sinks = None
    if options.sinks > 0:
        order = torch.arange(min(options.sinks, S), device=q.device)[None]
        if key_mask is not None:  # the first real keys of each row
            ranks = key_mask.long().cumsum(1)
            order = torch.searchsorted(ranks, (order + 1).expand(len(key_mask), -1).contiguous())
        sinks = order.clamp_max(S - 1)  # a row short of real keys gets its last position, which is never far
    for start in range(0, T, size):
        end = min(start + size, T)
        first, last = S - T + start, S - T + end
        reach = slice(max(0, first - W + 1), last)
        query = torch.arange(first, last, device=q.device)[:, None]
        key = torch.arange(reach.start, reach.stop, device=q.device)
        hidden = ((key > query) | (key <= query - W))[None]
        if key_mask is not None:
            hidden = hidden | ~key_mask[:, None, reach]
        extra = sinks
        if key_mask is None and last <= W:
            extra = None  # every sink is inside every window of this block
        if extra is not None:
            covered = extra[:, None] > query - W  # hidden or already in the range
            hidden = torch.cat([covered, hidden.expand(covered.shape[0], -1, -1)], dim=-1)
        yield _Block(slice(start, end), reach, extra, hidden[:, None])


def _logits(q: Tensor, k: Tensor, block: _Block, options: _Options) -> tuple[Tensor, Tensor | None]:
    """Logits of a block with −inf where hidden, and the softcap's slope."""
    logits = _grouped(q[:, :, block.queries], _take(k, block).mT).mul_(options.scale)
    slope = None
    if options.softcap is not None:
        tanh = logits.div_(options.softcap).tanh_()
        slope = 1 - tanh * tanh
        logits = tanh.mul_(options.softcap)
    return logits.masked_fill_(block.hidden, float("-inf")), slope


def _take(x: Tensor, block: _Block) -> Tensor:
    """Keys or values of a block, [B,heads,N+L,D]: sinks first."""
    reach = x[:, :, block.keys]
    if block.sinks is None:
        return reach
    return torch.cat([x.gather(2, _sink_index(x, block.sinks)), reach], dim=2)


def _put(dx: Tensor, block: _Block, d: Tensor) -> None:
    """Adds what `_take` took."""
    if block.sinks is not None:
        index = _sink_index(dx, block.sinks)
        dx.scatter_add_(2, index, d[:, :, : index.shape[2]])
        d = d[:, :, index.shape[2] :]
    dx[:, :, block.keys] += d


def _sink_index(x: Tensor, sinks: Tensor) -> Tensor:
    return sinks[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3])


def _grouped(a_BHQX: Tensor, b_BGXY: Tensor) -> Tensor:
    """a @ b where each head of b serves a group of consecutive heads of a."""
    B, H, Q, X = a_BHQX.shape
    heads, Y = b_BGXY.shape[1], b_BGXY.shape[3]
    if heads == H:
        return a_BHQX @ b_BGXY
    return (a_BHQX.reshape(B, heads, -1, X) @ b_BGXY).view(B, H, Q, Y)


def _grouped_transposed(a_BHQL: Tensor, b_BHQD: Tensor, heads: int) -> Tensor:
    """aᵀ @ b summed over the heads of a group: [B, heads, L, D]."""
    B, H, _, L = a_BHQL.shape
    if heads == H:
        return a_BHQL.mT @ b_BHQD
    return a_BHQL.reshape(B, heads, -1, L).mT @ b_BHQD.reshape(B, heads, -1, b_BHQD.shape[3])
