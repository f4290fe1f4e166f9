"""Functions inside kernels that stay exact at both ends."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """softplus(x) and its derivative sigmoid(x), each with a small relative error for any x."""
    e = tl.exp(-tl.abs(x))
    # log(1 + e) as 2 artanh(s): a logarithm near 1 would keep too few digits. s <= 1/3, so eight terms suffice.
    s = e / (2.0 + e)
    s2 = s * s
    series = 1.0 / 13.0 + s2 * (1.0 / 15.0)
    series = 1.0 / 9.0 + s2 * (1.0 / 11.0 + s2 * series)
    series = 1.0 / 5.0 + s2 * (1.0 / 7.0 + s2 * series)
    series = 1.0 + s2 * (1.0 / 3.0 + s2 * series)
    over = 1.0 / (1.0 + e)
    return tl.maximum(x, 0.0) + 2.0 * s * series, tl.where(x >= 0, over, e * over)


@triton.jit
def sigmoid(x):
    """sigmoid(x) and sigmoid(-x), each with a small relative error for any x."""
    e = tl.exp(-tl.abs(x))
    over = 1.0 / (1.0 + e)
    return tl.where(x >= 0, over, e * over), tl.where(x >= 0, e * over, over)
