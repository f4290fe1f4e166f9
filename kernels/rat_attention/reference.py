"""The specification: RAT attention token by token, in any float dtype."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.rat_attention.cache import RatCache
from linearize.kernels.rat_attention.rotary import rotate


def rat_attention_reference(
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
    """Output [B,T,H,K]; arguments as `rat_attention`. k, v and gate may have fewer heads than q."""
    B, T, H, K = q_BTHK.shape
    dtype = compute_dtype(q_BTHK, k_BTHK, v_BTHK, gate_BTHK, None if cache is None else cache.running_key)
    scale = K**-0.5 if scale is None else scale
    heads_k, heads_v = (math.lcm(x.shape[2], gate_BTHK.shape[2]) for x in (k_BTHK, v_BTHK))
    q = q_BTHK.to(dtype)
    k, gate_k = (_expand(x.to(dtype), heads_k) for x in (k_BTHK, gate_BTHK))
    v, gate_v = (_expand(x.to(dtype), heads_v) for x in (v_BTHK, gate_BTHK))

    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    rows = []
    caches: list[tuple[list[Tensor], list[Tensor], Tensor, Tensor, int]] = []
    for b in range(B):
        outputs = [q.new_zeros(H, K) for _ in range(T)]
        for start, end in itertools.pairwise(bounds):
            position, keys, values = 0, [], []  # keys and values: one of each finished chunk
            running_k, running_v = q.new_zeros(heads_k, K), q.new_zeros(heads_v, K)
            if cache is not None and cache.position is not None:
                position = int(cache.position[b])
                finished = range(position // chunk_size)
                assert cache.keys is not None and cache.values is not None
                assert cache.running_key is not None and cache.running_value is not None
                keys = [cache.keys[b, :, i].to(dtype) for i in finished]
                values = [cache.values[b, :, i].to(dtype) for i in finished]
                running_k, running_v = cache.running_key[b].to(dtype), cache.running_value[b].to(dtype)
            for t in range(start, end):
                if key_mask_BT is not None and not key_mask_BT[b, t]:
                    continue  # padding is not there at all
                if position % chunk_size == 0:
                    running_k, running_v = torch.zeros_like(running_k), torch.zeros_like(running_v)
                running_k = gate_k[b, t] * running_k + (1 - gate_k[b, t]) * k[b, t]
                running_v = gate_v[b, t] * running_v + (1 - gate_v[b, t]) * v[b, t]
                chunk = position // chunk_size
                cos, sin = (None, None) if position_embeddings is None else (x[chunk] for x in position_embeddings)
                own_k = rotate(running_k, cos, sin)
                seen_k = _expand(torch.stack([*keys, own_k]), H)
                seen_v = _expand(torch.stack([*values, running_v]), H)
                p = (torch.einsum("hk,shk->sh", rotate(q[b, t], cos, sin), seen_k) * scale).softmax(0)
                outputs[t] = torch.einsum("sh,shk->hk", p, seen_v)
                position += 1
                if position % chunk_size == 0:
                    keys.append(own_k)
                    values.append(running_v)
        rows.append(torch.stack(outputs) if outputs else q[b])
        caches.append((keys, values, running_k, running_v, position))
    if cache is not None:
        _fill(cache, caches, T, k_BTHK.dtype, v_BTHK.dtype)
    o = torch.stack(rows) if rows else q
    return o.to(v_BTHK.dtype)


def _expand(x: Tensor, heads: int) -> Tensor:
    """[..., G, K] to [..., heads, K]: head h is a copy of h // (heads / G)."""
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def _fill(
    cache: RatCache,
    rows: list[tuple[list[Tensor], list[Tensor], Tensor, Tensor, int]],
    tokens: int,
    key_dtype: torch.dtype,
    value_dtype: torch.dtype,
) -> None:
    cache.length += tokens
    slots = cache.length // cache.chunk_size

    def table(lists: list[list[Tensor]], like: list[Tensor]) -> Tensor:
        padded = [
            [*chunks, *[torch.zeros_like(zero)] * (slots - len(chunks))]
            for chunks, zero in zip(lists, like, strict=True)
        ]
        if slots == 0:
            return torch.stack(like)[:, :, None][:, :, :0]
        return torch.stack([torch.stack(chunks, dim=1) for chunks in padded])

    running_k, running_v = [row[2] for row in rows], [row[3] for row in rows]
    cache.keys = table([row[0] for row in rows], running_k).to(key_dtype)
    cache.values = table([row[1] for row in rows], running_v).to(value_dtype)
    cache.running_key, cache.running_value = torch.stack(running_k), torch.stack(running_v)
    cache.position = torch.tensor([row[4] for row in rows], device=cache.keys.device)
