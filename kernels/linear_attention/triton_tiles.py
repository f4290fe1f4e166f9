"""Pieces that the linear attention kernels share: tiles, where chunks lie, and decays inside a chunk."""

from __future__ import annotations

import triton
import triton.language as tl

# A chunk whose summed log decay is above this takes its scores in one product: with the exponents centred
# they stay below 60 in size, and e^60 is far from overflowing. Stronger decays are split until every
# exponent is <= 0.
SPAN = tl.constexpr(120.0)
# A chunk that keeps more than this of every channel is weakly decayed: one kernel without branches takes it.
WEAK = tl.constexpr(1.8e-35)  # e^-80
# Log decays are clamped here (e^-1000 is 0), which keeps their sums exact.
FLOOR = tl.constexpr(-1000.0)
# A decay below this is 0 (e^-87 is the smallest normal number), and so is its gradient. The sums that the gradient is
# made of leave a rounding error there, which a rate that grows exponentially would multiply by -log decay.
VANISHED = tl.constexpr(-87.0)


@triton.jit
def load_tile(ptr, row_ok, column_ok, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """Load a tile, zeros outside; masks that are always true are left out."""
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(ptr)
    elif EVEN_ROWS:
        return tl.load(ptr, mask=column_ok[None, :], other=0.0)
    elif EVEN_COLUMNS:
        return tl.load(ptr, mask=row_ok[:, None], other=0.0)
    else:
        return tl.load(ptr, mask=row_ok[:, None] & column_ok[None, :], other=0.0)


@triton.jit
def store_tile(ptr, value, row_ok, column_ok, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """Store a tile inside its bounds."""
    if EVEN_ROWS and EVEN_COLUMNS:
        tl.store(ptr, value)
    elif EVEN_ROWS:
        tl.store(ptr, value, mask=column_ok[None, :])
    elif EVEN_COLUMNS:
        tl.store(ptr, value, mask=row_ok[:, None])
    else:
        tl.store(ptr, value, mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def split_sum(g):
    """A log decay as a multiple of 1/64, whose sums are exact, and a rest below 1/64, whose sums stay "
    "small."""
    g = tl.maximum(g, FLOOR)
    high = tl.floor(g * 64.0) * 0.015625
    return high, g - high


@triton.jit
def whole(a, a_low, EXACT: tl.constexpr):
    if EXACT:
        return a + a_low
    else:
        return a


@triton.jit
def difference(a, a_low, b, b_low, EXACT: tl.constexpr):
    if EXACT:
        return (a - b) + (a_low - b_low)
    else:
        return a - b


@triton.jit
def find_chunk(index, N, T, cu_ptr, cu_chunks_ptr, CHUNK: tl.constexpr, VARLEN: tl.constexpr):
    """Which sequence a chunk belongs to: (batch, first row, length, chunk in the sequence)."""
    if VARLEN:
        low = 0
        high = N
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(cu_chunks_ptr + middle) <= index:
                low = middle
            else:
                high = middle
        first_row = tl.load(cu_ptr + low).to(tl.int64)
        length = (tl.load(cu_ptr + low + 1).to(tl.int64) - first_row).to(tl.int32)
        chunk = index - tl.load(cu_chunks_ptr + low).to(tl.int32)
        batch = first_row * 0
    else:
        per = tl.cdiv(T, CHUNK)
        batch = (index // per).to(tl.int64)
        chunk = index % per
        first_row = batch * 0
        length = T
    return batch, first_row, length, chunk


@triton.jit
def take_rows(x, index, CHUNK: tl.constexpr, K_BLOCK: tl.constexpr):
    """x[index], row by row."""
    return tl.gather(x, tl.broadcast_to(index[:, None], (CHUNK, K_BLOCK)), 0)


@triton.jit
def lower_halves(row, half):
    """Pairs (query, key) of one block of 2·half rows, the query in its second half, the key in its first."""
    block = row // half
    return (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)


@triton.jit
def lower_triangles(row, WIDTH: tl.constexpr):
    """Pairs (query, key) of one block of WIDTH rows, the query after the key."""
    return (row[:, None] // WIDTH == row[None, :] // WIDTH) & (row[:, None] > row[None, :])


@triton.jit
def log_decays(g, EXCLUSIVE: tl.constexpr, EXACT: tl.constexpr):
    """Sums of log decay in a chunk, to the query at i and to the key at j, and each one's rest (see
    `split_sum`).

    The query's sum leaves its own step out if EXCLUSIVE. Without EXACT the rests stand unused: sums are then
    right to about 1e-7 of the chunk's whole log decay.
    """
    if EXACT:
        high, low = split_sum(g)
        k_low = tl.cumsum(low, 0)
        q_low = k_low
        if EXCLUSIVE:
            q_low = k_low - low
    else:
        high = g
    k_sum = tl.cumsum(high, 0)
    q_sum = k_sum
    if EXCLUSIVE:
        q_sum = k_sum - high
    if not EXACT:
        k_low = k_sum
        q_low = q_sum
    return q_sum, q_low, k_sum, k_low


@triton.jit
def decay_to_end(k_sum, k_low, g, EXACT: tl.constexpr):
    """Log decay from the key at j to the end of the chunk."""
    if EXACT:
        high, low = split_sum(g)
        return (tl.sum(high, 0)[None, :] - k_sum) + (tl.sum(low, 0)[None, :] - k_low)
    else:
        return tl.sum(g, 0)[None, :] - k_sum


@triton.jit
def centred(
    q_sum,
    q_low,
    k_sum,
    k_low,
    g,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Decay factors of queries and keys about the middle of the decay over their block of WIDTH rows."""
    if EXACT:
        high, low = split_sum(g)
        before_low = k_low - low
    else:
        high = g
    before = k_sum - high
    if WIDTH == CHUNK:
        m = 0.5 * tl.sum(high, 0)[None, :]
        m_low = m
        if EXACT:
            m_low = 0.5 * tl.sum(low, 0)[None, :]
    else:
        row = tl.arange(0, CHUNK)
        first = row // WIDTH * WIDTH
        last = first + WIDTH - 1
        m = 0.5 * (take_rows(before, first, CHUNK, K_BLOCK) + take_rows(k_sum, last, CHUNK, K_BLOCK))
        m_low = m
        if EXACT:
            m_low = 0.5 * (take_rows(before_low, first, CHUNK, K_BLOCK) + take_rows(k_low, last, CHUNK, K_BLOCK))
    queries = tl.exp(difference(q_sum, q_low, m, m_low, EXACT))
    keys = tl.exp(difference(m, m_low, k_sum, k_low, EXACT))
    return queries, keys


@triton.jit
def halved(q_sum, q_low, k_sum, k_low, half, CHUNK: tl.constexpr, K_BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """Decay factors of second-half queries since, and first-half keys until, the end of the first half."""
    row = tl.arange(0, CHUNK)
    middle = row // (2 * half) * (2 * half) + half - 1
    m = take_rows(k_sum, middle, CHUNK, K_BLOCK)
    m_low = m
    if EXACT:
        m_low = take_rows(k_low, middle, CHUNK, K_BLOCK)
    queries = tl.exp(tl.minimum(difference(q_sum, q_low, m, m_low, EXACT), 0.0))
    keys = tl.exp(tl.minimum(difference(m, m_low, k_sum, k_low, EXACT), 0.0))
    return queries, keys


@triton.jit
def product(q, k, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """q kᵀ in a dtype wide enough for centred decay factors."""
    return tl.dot(q.to(WIDE), tl.trans(k.to(WIDE)), input_precision=PRECISION)


@triton.jit
def weakest(g, WIDTH: tl.constexpr, CHUNK: tl.constexpr, K_BLOCK: tl.constexpr):
    """The lowest sum of log decay over any block of WIDTH rows and any channel."""
    sums = tl.sum(tl.reshape(g, (CHUNK // WIDTH, WIDTH, K_BLOCK)), 1)
    return tl.min(tl.min(sums, 1), 0)


@triton.jit
def sum_rows(select, x, PIECE: tl.constexpr):
    """select @ x for a matrix of 0 and 1: sums over rows, in matrix products. x keeps 16 bits of its digits."""
    high = x.to(PIECE)
    low = (x - high.to(tl.float32)).to(PIECE)
    return tl.dot(select, low, tl.dot(select, high, input_precision="ieee"), input_precision="ieee")
