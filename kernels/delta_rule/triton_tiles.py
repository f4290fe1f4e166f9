"""Pieces that the delta rule's kernels share: a decay per token inside a chunk, and the chunk's triangular inverse."""

from __future__ import annotations

import triton
import triton.language as tl

from linearize.kernels.linear_attention.triton_tiles import FLOOR, difference, lower_halves, split_sum, whole


@triton.jit
def token_decays(g, EXACT: tl.constexpr):
    """For log decays [C]: their sums and each one's rest, then decays from the chunk's start, to its end, over it."""
    if EXACT:
        high, low = split_sum(g)
        G_low = tl.cumsum(low, 0)
        all_low = tl.sum(low, 0)
    else:
        high = tl.maximum(g, FLOOR)
    G = tl.cumsum(high, 0)
    all = tl.sum(high, 0)
    if not EXACT:
        G_low = G
        all_low = all
    from_start = tl.exp(whole(G, G_low, EXACT))
    to_end = tl.exp(difference(all, all_low, G, G_low, EXACT))
    return G, G_low, from_start, to_end, tl.exp(whole(all, all_low, EXACT))


@triton.jit
def decays_between(G, G_low, seen, EXACT: tl.constexpr):
    """The decay from key j to query i where `seen`, else 0."""
    between = difference(G[:, None], G_low[:, None], G[None, :], G_low[None, :], EXACT)
    return tl.exp(tl.where(seen, between, float("-inf")))


@triton.jit
def unit_lower_inverse(n, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + n)⁻¹ for a strictly lower triangular n, by block doubling: each level fills in one corner per block.

    No power of n is ever formed, so equal keys (where powers grow like binomials) keep their digits.
    """
    row = tl.arange(0, CHUNK)
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0) - tl.where(lower_halves(row, 1), n, 0.0)
    for level in range(1, LEVELS):  # not unrolled: in float32 that would take half a minute to compile
        corner = tl.where(lower_halves(row, 1 << level), n, 0.0)
        corner = tl.dot(corner, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, corner, input_precision=PRECISION)
    return inverse
