"""What the window attention kernels share: the launch table, the band's geometry and one block of logits.

A block's M rows are pairs (query, head) with the heads of a group side by side, so that a tile of keys and one of
values are read once for all query heads that share them, and a group of R heads spans M/R positions only.
Query t stands at position t + S − T of the S keys. It sees key j if

    start <= j <= i  and  (j > i − window  or  j < sink end)  and  j is real,

start being where its sequence begins: 0, a packed sequence's first position, or what the caller says.

Suffixes: B batch, T queries, S keys, H query heads, R heads in a group, K key width, V value width; M rows and
N keys in a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels import fitting
from linearize.kernels.linear_attention.triton_common import dot_precision

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Launch:
    """Rows and keys in a block, warps per program, software pipeline depth."""

    rows: int
    keys: int
    warps: int
    stages: int


def band_launch(width: int, itemsize: int, window: int, kernel: str) -> Launch:
    """By the larger of the two head widths, the element size and the kernel; nothing is tuned at start-up."""
    if itemsize > 2:  # float32: registers and shared memory are short, and speed is not the point
        return Launch(32, 32, 4, 1)
    if width > 128:
        return Launch(32, 32, 4, 1) if fitting.little_shared_memory() else Launch(64, 64, 8, 1)
    # Narrow windows would waste most of a long block's products.
    if kernel == "keys" and window >= 512:
        return Launch(64, 128, 8, 2)
    if kernel == "forward":
        return Launch(64, 32, 4, 2) if window < 512 else Launch(128, 64, 4 if width <= 64 else 8, 2)
    return Launch(64, 64, 4, 2)


def width_block(width: int, itemsize: int) -> int:
    """16-bit products narrower than 64 are miscompiled by Triton 3.6 on Hopper."""
    return max(64 if itemsize <= 2 else 16, triton.next_power_of_2(width))


class Band:
    """Which keys the queries see, as tensors that the kernels read; no value is read by the host."""

    def __init__(
        self,
        S: int,
        window: int,
        sinks: int,
        softcap: float | None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        first: Tensor | None = None,
    ) -> None:
        """Instead of `cu_seqlens`, `first` [B or 1, T] int32 says where what each query sees starts; it never falls."""
        self.window, self.sinks, self.softcap = min(window, S), min(sinks, S), softcap
        self.real = None if key_mask is None else key_mask.contiguous()
        self.sink_range = self.sequence = None
        if key_mask is not None and sinks > 0:  # from the first real key to after the last sink
            rank = key_mask.cumsum(1)
            ends = ((rank < sinks).sum(1) + 1).clamp_max(S)
            self.sink_range = torch.stack([(rank == 0).sum(1), ends]).to(torch.int32)
        if cu_seqlens is not None:  # where the sequence of each position starts and stops
            bounds = cu_seqlens.to(torch.int32)
            position = torch.arange(S, dtype=torch.int32, device=bounds.device)
            after = torch.searchsorted(bounds, position, right=True)
            self.sequence = torch.stack([bounds[after - 1], bounds[after]])[None]
        if first is not None:  # as if a sequence started there, and stopped where a key is seen no more
            rows, earlier = first.shape[0], S - first.shape[1]
            key = torch.arange(S, dtype=torch.int32, device=first.device).expand(rows, S).contiguous()
            stop = earlier + torch.searchsorted(first.contiguous(), key, right=True, out_int32=True)
            self.sequence = torch.stack([torch.nn.functional.pad(first, (earlier, 0)), stop], 1)

    def arguments(self, q: Tensor, k: Tensor, scale: float) -> list[Any]:
        """What each kernel takes after its tensors, but for strides."""
        logit_scale = scale * LOG2E if self.softcap is None else scale / self.softcap
        cap = 0.0 if self.softcap is None else self.softcap * LOG2E
        sequence_b = 0 if self.sequence is None or len(self.sequence) == 1 else self.sequence.stride(0)
        where = (self.window, self.sinks, self.real, self.sink_range, self.sequence, sequence_b)
        return [q.shape[0], q.shape[1], k.shape[1], *where, logit_scale, cap]

    def options(self, q: Tensor, k: Tensor, v: Tensor, kernel: str) -> dict[str, Any]:
        """The compile-time arguments of the "forward", "queries" or "keys" kernel."""
        (H, K), V = q.shape[2:], v.shape[3]
        size = q.element_size()
        launch = band_launch(max(K, V), size, self.window, kernel)
        return {
            "H": H,
            "R": shared_heads(H, k.shape[2], v.shape[2]),
            "K_GROUP": H // k.shape[2],
            "V_GROUP": H // v.shape[2],
            "K": K,
            "V": V,
            "M": launch.rows,
            "N": launch.keys,
            "K_BLOCK": width_block(K, size),
            "V_BLOCK": width_block(V, size),
            "CAPPED": self.softcap is not None,
            "MASKED": self.real is not None,
            "SINKS": self.sinks > 0,
            "PACKED": self.sequence is not None,
            "PRECISION": dot_precision(q.dtype),
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }


def shared_heads(H: int, key_heads: int, value_heads: int) -> int:
    """How many consecutive query heads share both their keys and their values."""
    return math.gcd(H // key_heads, H // value_heads)


@triton.jit
def tile(ptr, n, limit, i, stride, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Rows n of a matrix, zeros from row `limit` on (WHOLE: there are none) and beyond WIDTH."""
    spot = ptr + n.to(tl.int64)[:, None] * stride + i[None, :]
    if WHOLE:
        return tl.load(spot, mask=(i < WIDTH)[None, :], other=0.0)
    return tl.load(spot, mask=(n < limit)[:, None] & (i < WIDTH)[None, :], other=0.0)


@triton.jit
def capped(s, logit_scale, cap, CAPPED: tl.constexpr):
    """Logits to base 2 from products, and tanh where they are capped (its slope is 1 − tanh²)."""
    s = s * logit_scale
    tanh = s
    if CAPPED:
        e = tl.exp2(tl.abs(s) * -2.8853900817779268)  # e^(−2|s|)
        tanh = (1.0 - e) / (1.0 + e)
        tanh = tl.where(s < 0.0, -tanh, tanh)
        s = tanh * cap
    return s, tanh


@triton.jit
def sequence_start(sequence_ptr, i, ok, PACKED: tl.constexpr):
    """Where the sequences of positions i start."""
    if PACKED:
        return tl.load(sequence_ptr + i, mask=ok, other=0)
    return i * 0


@triton.jit
def sink_end(sink_ptr, b, B, start, sinks, MASKED: tl.constexpr, SINKS: tl.constexpr):
    """The position after the last sink of sequences that start at `start`."""
    if MASKED and SINKS:
        return start * 0 + tl.load(sink_ptr + B + b)
    return start + sinks


@triton.jit
def visible(i, j, start, sinks_to, window, real_ptr, S, MASKED: tl.constexpr, SINKS: tl.constexpr):
    """Which keys j the queries at i see; i, its start and sink end against j as rows against columns, or the reverse.

    `real_ptr` is the batch row's.
    """
    near = j > i - window
    if SINKS:
        near = near | (j < sinks_to)
    seen = near & (j <= i) & (j >= start)
    if MASKED:
        seen = seen & (tl.load(real_ptr + j, mask=j < S, other=0) != 0)
    return seen


@triton.jit
def whole_keys(low, first_i, last_i, last_start, window, N: tl.constexpr, MASKED: tl.constexpr):
    """The range of keys, in steps of N from `low`, that queries first_i .. last_i all see; it may be empty."""
    begin = tl.maximum(tl.maximum(last_i - window + 1, last_start) - low, 0)
    begin = low + tl.minimum(tl.cdiv(begin, N), tl.cdiv(last_i + 1 - low, N)) * N
    end = begin
    if not MASKED:
        end += tl.maximum(first_i + 1 - begin, 0) // N * N
    return begin, end
