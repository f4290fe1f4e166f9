"""RAT with a window in plain torch: the CPU path, differentiable.

Blocks of queries meet the slice of keys and the summaries in their reach, in one softmax. The backward pass
recomputes the probabilities from the saved log-sum-exp, so that memory grows with T and a block's logits only.

Shape suffixes: B batch, T queries, S keys, N summaries, H query heads, G kv heads, R query heads per kv head
(H = G·R), K width, Q queries, L keys and M summaries of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.rat_attention.window_places import Places, places

MAX_BLOCK = 256
MIN_BLOCK = 64


def rat_window_attention_chunked(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    keys_BNGK: Tensor,
    values_BNGK: Tensor,
    offset_H: Tensor,
    *,
    window: int,
    chunk_size: int,
    origin_B: Tensor | None = None,
    reach: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Same arguments and results as `rat_window_attention_reference`."""
    (B, T, H, K), (S, G) = q_BTHK.shape, k_BSGK.shape[1:3]
    dtype = compute_dtype(q_BTHK, k_BSGK, v_BSGK, keys_BNGK, values_BNGK, offset_H)
    if q_BTHK.numel() == 0:
        return q_BTHK.to(v_BSGK.dtype, copy=True)  # empty, but a part of q's graph
    # On the meta device there are no numbers to cut blocks by, but places follow from shapes alone.
    device = torch.device("cpu") if q_BTHK.is_meta and origin_B is None else q_BTHK.device
    seen = places(T, S, window, chunk_size, origin_B, reach, device)
    q = q_BTHK.to(dtype).view(B, T, G, H // G, K).permute(0, 2, 3, 1, 4)
    pairs = (x.to(dtype).transpose(1, 2).contiguous() for x in (k_BSGK, v_BSGK, keys_BNGK, values_BNGK))
    options = _Options(seen, K**-0.5 if scale is None else scale, softcap)
    o_BGRTK = _Blocks.apply(q, *pairs, offset_H.to(dtype).view(G, -1), options)
    return o_BGRTK.permute(0, 3, 1, 2, 4).reshape(B, T, H, K).to(v_BSGK.dtype)


@dataclass(frozen=True)
class _Options:
    places: Places
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class _Block:
    """A block of queries; the keys and the summaries in its reach; which of the last of those a query does not see."""

    queries: slice
    near: slice
    far: slice
    near_hidden: Tensor
    far_hidden: Tensor


def _blocks(seen: Places, target: torch.device) -> Iterator[_Block]:
    T, device = seen.first.shape[1], seen.first.device
    size = max(MIN_BLOCK, min(MAX_BLOCK, 1 << (seen.width - 1).bit_length()))
    starts = torch.arange(0, T, size, device=device)
    ends = (starts + size).clamp_max(T)
    firsts, lows, all_see = (x[:, starts].amin(0).tolist() for x in (seen.first, seen.low, seen.high))
    highs = seen.high[:, ends - 1].amax(0).tolist()
    same_low = [low == high for low, high in zip(lows, seen.low[:, ends - 1].amax(0).tolist(), strict=True)]
    for i, start in enumerate(range(0, T, size)):
        rows = slice(start, min(start + size, T))
        key_stop = seen.keys - T + rows.stop
        near, far = slice(min(firsts[i], key_stop - 1), key_stop), slice(lows[i], max(lows[i], highs[i]))
        key = torch.arange(near.start, near.stop, device=device)
        own = torch.arange(seen.keys - T + rows.start, key_stop, device=device)[:, None]
        near_hidden = (key > own) | (key < seen.first[:, rows, None])
        partly = min(max(all_see[i], far.start), far.stop) if same_low[i] else far.start
        n = torch.arange(partly, far.stop, device=device)
        far_hidden = (n >= seen.high[:, rows, None]) | (n < seen.low[:, rows, None])
        yield _Block(rows, near, far, near_hidden.to(target), far_hidden.to(target))


class _Blocks(torch.autograd.Function):
    """q [B,G,R,T,K], k and v [B,G,S,K], summaries [B,G,N,K], offset [G,R] -> [B,G,R,T,K]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, offset: Tensor, options: _Options
    ) -> Tensor:
        o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[:-1])
        for block in _blocks(options.places, q.device):
            q_BGXK, shape = _rows(q, block)
            near, _ = _logits(q_BGXK, k[:, :, block.near], shape, block.near_hidden, options)
            far, _ = _logits(q_BGXK, keys[:, :, block.far], shape, block.far_hidden, options, offset)
            top = near.amax(-1, keepdim=True).clamp_min_(torch.finfo(q.dtype).min)
            if far.shape[-1]:
                top = torch.maximum(top, far.amax(-1, keepdim=True))
            p_near, p_far = near.sub_(top).exp_(), far.sub_(top).exp_()
            total = p_near.sum(-1, keepdim=True).add_(p_far.sum(-1, keepdim=True))
            lse[..., block.queries] = (top + total.log())[..., 0]
            y = _flat(p_near) @ v[:, :, block.near] + _flat(p_far) @ values[:, :, block.far]
            y = y.view(*shape, -1).div_(total.clamp_min_(torch.finfo(q.dtype).tiny))
            o[..., block.queries, :] = y
        ctx.save_for_backward(q, k, v, keys, values, offset, o, lse)
        ctx.options = options
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, *pairs, offset, o, lse = ctx.saved_tensors
        options: _Options = ctx.options
        dq, doffset = torch.empty_like(o), torch.zeros_like(offset)
        gradients = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in pairs]
        delta = (do * o).sum(-1, keepdim=True)
        lse = lse.masked_fill(lse == float("-inf"), 0)[..., None]  # no key is seen
        for block in _blocks(options.places, q.device):
            q_BGXK, shape = _rows(q, block)
            do_BGXK, _ = _rows(do, block)
            dq_BGXK = torch.zeros_like(q_BGXK)
            rows = block.queries
            for place, reach, hidden, extra in (
                (0, block.near, block.near_hidden, None),
                (2, block.far, block.far_hidden, offset),
            ):
                key, value = (x[:, :, reach] for x in pairs[place : place + 2])
                dkey, dvalue = (x[:, :, reach] for x in gradients[place : place + 2])
                p, slope = _logits(q_BGXK, key, shape, hidden, options, extra)
                p = p.sub_(lse[..., rows, :]).exp_()
                dvalue += _flat(p).mT @ do_BGXK
                ds = (do_BGXK @ value.mT).view(p.shape).sub_(delta[..., rows, :]).mul_(p)
                if extra is not None:
                    doffset += ds.sum((0, 3, 4))
                if slope is not None:
                    ds.mul_(slope)
                ds_BGXL = _flat(ds.mul_(options.scale))
                dkey += ds_BGXL.mT @ q_BGXK
                dq_BGXK += ds_BGXL @ key
            dq[..., rows, :] = dq_BGXK.view(*shape, -1)
        return dq, *gradients, doffset, None


def _rows(x_BGRTK: Tensor, block: _Block) -> tuple[Tensor, torch.Size]:
    """A block's rows [B,G,R·Q,K], and [B,G,R,Q]."""
    x = x_BGRTK[..., block.queries, :]
    return x.reshape(*x.shape[:2], -1, x.shape[-1]), x.shape[:-1]


def _flat(p_BGRQL: Tensor) -> Tensor:
    return p_BGRQL.flatten(2, 3)


def _logits(
    q_BGXK: Tensor,
    key_BGLK: Tensor,
    shape: torch.Size,
    hidden: Tensor,
    options: _Options,
    offset_GR: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Logits [B,G,R,Q,L], −inf where the last of them are hidden, and the softcap's slope."""
    logits, slope = (q_BGXK @ key_BGLK.mT).mul_(options.scale).view(*shape, key_BGLK.shape[2]), None
    if options.softcap is not None:
        tanh = logits.div_(options.softcap).tanh_()
        slope = 1 - tanh * tanh
        logits = tanh.mul_(options.softcap)
    if offset_GR is not None:
        logits.add_(offset_GR[..., None, None])
    partly = logits.shape[-1] - hidden.shape[-1]
    logits[..., partly:].masked_fill_(hidden[:, None, None], float("-inf"))
    return logits, slope
