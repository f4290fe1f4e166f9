"""RAT attention beside a window of exact keys: summaries and keys in one softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.gated_scan.arguments import check_chunk_size
from linearize.kernels.rat_attention.window_chunked import rat_window_attention_chunked
from linearize.kernels.rat_attention.window_reference import rat_window_attention_reference
from linearize.kernels.window_attention.arguments import no_kernel_for

_NAME = "rat_window_attention"


def rat_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    offset: Tensor,
    *,
    window: int,
    chunk_size: int,
    origin: Tensor | None = None,
    reach: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention, in one softmax, to the exact keys of a window and to one summary per chunk before it.

    The token at position p of its row sees the keys of positions s .. p, s = ⌊(p − window + 1) / chunk_size⌋ ·
    chunk_size (window to window + chunk_size − 1 keys), and the summaries of all chunks that end before s. Without a
    window it sees the summaries of all earlier chunks and its own pair (k_p, v_p) alone, which then is the running
    mean of its chunk. Statistics are kept in float32 (float64 for float64 inputs). Differentiable (once) in q, k, v,
    the summaries and the offset.

    Args:
        q: [B, T, H, K], any float dtype, any strides.
        k, v: [B, S, G, K] with S >= T and G dividing H; the queries are the last T of the S positions. Earlier keys
            that a query would see must be there.
        keys, values: [B, N, G, K], the summary of chunk n at n, from the row's first chunk on; those no query sees
            are not read and may be left out.
        offset: [H], added to the logits of summaries.
        window: exact keys a query sees at least; 0 for its own pair alone.
        chunk_size: tokens per summary, a power of two.
        origin: [B] int64, where among the S positions each row's position 0 is: greater than 0 behind padding,
            less than 0 where tokens came earlier. Outputs at padding are 0. Default: 0.
        reach: how many positions a query sees in all, >= 1; a chunk counts by its last token. Default: no limit.
        scale: multiplies the logits. Default: `K ** -0.5`.
        softcap: replaces each scaled logit x by `softcap * tanh(x / softcap)`, before the offset. Default: None.
        backend: "auto" (Triton on CUDA, else blocks of queries in plain torch), "triton", "chunked" or "reference"
            (a loop).

    Returns:
        o: [B, T, H, K] in v's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it and the fix.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: RAT (arXiv:2507.04416), its attention over chunks joined with a sliding window.
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "T", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "S", "G", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "S", "G", "K"), dims)
    check_tensor(_NAME, "keys", keys, ("B", "N", "G", "K"), dims)
    check_tensor(_NAME, "values", values, ("B", "N", "G", "K"), dims)
    check_tensor(_NAME, "offset", offset, ("H",), dims)
    check_options(_NAME, dims, window, chunk_size, reach, softcap)
    if dims["S"] < dims["T"]:
        raise ValueError(
            f"{_NAME}: k has S={dims['S']} positions, fewer than q's T={dims['T']}; the queries are the last T keys"
        )
    if origin is not None:
        check_tensor(_NAME, "origin", origin, ("B",), dims)
        if origin.dtype != torch.int64:
            raise TypeError(f"{_NAME}: origin has dtype {origin.dtype}; convert it to int64")
    tensors = {"q": q, "k": k, "v": v, "keys": keys, "values": values, "offset": offset}
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "origin": origin})
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=no_kernel_for(*tensors.values()))
    run: Any = rat_window_attention_reference if chosen == "reference" else rat_window_attention_chunked
    if chosen == "triton" and q.numel() > 0:
        from linearize.kernels.rat_attention.triton_window import rat_window_attention_triton as run
    options: dict[str, Any] = {"window": window, "chunk_size": chunk_size, "origin_B": origin, "reach": reach}
    return run(q, k, v, keys, values, offset, **options, scale=scale, softcap=softcap)


def check_options(
    operation: str, dims: dict[str, int], window: object, chunk_size: object, reach: object, softcap: float | None
) -> None:
    """Check the numbers that attention and its step share."""
    if dims["G"] < 1 or dims["H"] % dims["G"]:
        raise ValueError(f"{operation}: k has {dims['G']} heads and q {dims['H']}; q's must be a multiple of k's")
    check_chunk_size(operation, chunk_size, optional=False)
    for name, value, least in (("window", window, 0), ("reach", 1 if reach is None else reach, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{operation}: {name} is {value!r}; it must be an integer >= {least}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{operation}: softcap is {softcap}; it must be positive, or None for no cap")
