"""Checks that RAT attention and its step share."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device
from linearize.kernels.rat_attention.cache import RatCache


def check_heads(operation: str, dims: dict[str, int]) -> int:
    """Check that q, k, v and gate have numbers of heads that can be shared out; the largest of them."""
    H = max(dims[f"H{name}"] for name in ("q", "k", "v", "g"))
    for name in ("q", "k", "v", "g"):
        heads = dims[f"H{name}"]
        if heads < 1 or H % heads:
            argument = "gate" if name == "g" else name
            raise ValueError(
                f"{operation}: {argument} has {heads} heads and another input {H}; the largest number must be a "
                f"multiple of {argument}'s"
            )
    return H


def check_tables(
    operation: str, tables: tuple[Tensor, Tensor] | None, chunks: int, width: int, device: torch.device
) -> None:
    """Check the rotary tables: two of [N, R], enough rows for every chunk."""
    if tables is None:
        return
    if not isinstance(tables, (tuple, list)) or len(tables) != 2 or not all(isinstance(x, Tensor) for x in tables):
        raise TypeError(
            f"{operation}: position_embeddings is {type(tables).__name__}; pass two tensors (cos, sin) of shape [N, R]"
        )
    cos, sin = tables
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[1] > width or cos.shape[1] % 2:
        raise ValueError(
            f"{operation}: position_embeddings have shapes {tuple(cos.shape)} and {tuple(sin.shape)}; both must be "
            f"[N, R] with an even R <= K={width}"
        )
    if cos.shape[0] < chunks:
        raise ValueError(
            f"{operation}: position_embeddings have {cos.shape[0]} rows for {chunks} chunks; they need one row per "
            "chunk"
        )
    check_float(operation, {"position_embeddings (cos)": cos, "position_embeddings (sin)": sin})
    check_same_device(operation, {"position_embeddings": cos, "position_embeddings (sin)": sin})
    if cos.device != device:
        raise ValueError(f"{operation}: position_embeddings are on {cos.device} but q is on {device}; move them there")


def check_cache(
    operation: str, cache: object, batch: int, heads: tuple[int, int], width: int, device: torch.device
) -> None:
    """Check that a cache was made for inputs like these."""
    if not isinstance(cache, RatCache):
        raise TypeError(f"{operation}: cache is {type(cache).__name__}; pass a RatCache(chunk_size=...)")
    for name, running, G in (("keys", cache.running_key, heads[0]), ("values", cache.running_value, heads[1])):
        if running is None:
            continue
        if tuple(running.shape) != (batch, G, width):
            raise ValueError(
                f"{operation}: cache holds {name} of [B, heads, K] = {list(running.shape)}, but these inputs need "
                f"{[batch, G, width]}; use the cache of this layer and batch"
            )
        if running.device != device:
            raise ValueError(f"{operation}: cache is on {running.device} but q is on {device}; move them to one device")
