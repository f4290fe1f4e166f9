"""Launch configurations of the Triton kernels: a small table by width and element size, measured on an H200 with
Triton 3.6 (docs/kernels.md); nothing is tuned at start-up.

In 16 bits no block is narrower than 64 channels. Triton 3.6 on Hopper reads past shared memory in products of
narrower tiles (github.com/triton-lang/triton/issues/11366): `_finish` with 32 key channels and `_scan` with 16
failed so on an H200.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

CHUNK = 64
GROUP = 16  # chunks that one program of `_prepare` or `_finish` looks through for strong decays


@dataclass(frozen=True)
class Launch:
    """Block width along the split dimension, warps per program and software pipeline depth."""

    block: int
    warps: int
    stages: int


def padded(width: int, itemsize: int) -> int:
    """The power of two that a matrix dimension is padded to: at least 64 in 16 bits, 16 in 32."""
    return max(64 if itemsize == 2 else 16, 1 << (width - 1).bit_length())


def scan_launch(
    a_width: int, c_width: int, itemsize: int, *, per_token: bool = False, chunk_scores: bool = False
) -> Launch:
    """`_scan`: the state is `padded(a_width)` by `block`.

    per_token: with one decay per token; chunk_scores: scores are read and only outputs written.
    """
    a_block, c_block = padded(a_width, itemsize), padded(c_width, itemsize)
    if itemsize > 2:  # float32: registers and shared memory are short, and speed is not the point
        return Launch(min(32, c_block), 8 if a_block > 64 else 4, 1)
    if a_block > 128:
        return Launch(64, 8, 1)
    if chunk_scores and a_block == 128 and c_block >= 128:
        return Launch(128, 4, 3)
    return Launch(64, 4, 2 if per_token else 3)


def prepare_launch(width: int, itemsize: int) -> Launch:
    """`_prepare`: `block` key channels at a time."""
    return Launch(min(64 if itemsize == 2 else 32, padded(width, itemsize)), 4, 1)


def finish_launch(k_width: int, v_width: int, itemsize: int) -> tuple[Launch, int]:
    """`_finish`: `block` key channels per program, and how many value channels it reads at a time."""
    widest = 64 if itemsize == 2 else 32
    return Launch(min(widest, padded(k_width, itemsize)), 8, 1), min(widest, padded(v_width, itemsize))


def finish_weak_launch(k_width: int, v_width: int) -> tuple[Launch, int]:
    """`_finish_weak`, like `finish_launch`. Warps are four since eight would each do all 64 rows of a chunk twice."""
    return Launch(64, 4, 3 if v_width > 128 else 1), 64


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def segments(programs: int, chunks: int, device: torch.device) -> int:
    """Into how many segments to cut the sequences so that there are four programs for each multiprocessor.

    A cut costs a second pass over keys and values, so a GPU that is at least filled once is left alone, and a segment
    is never shorter than eight chunks.
    """
    processors = _multiprocessors(device)
    if programs <= 0 or programs >= processors:
        return 1
    return max(1, min(4 * processors // programs, chunks // 8))


def step_launch(k_width: int, v_width: int) -> Launch:
    """`_step`: `block` value channels of the state per program."""
    k_block, v_block = (1 << (width - 1).bit_length() for width in (k_width, v_width))
    return Launch(min(max(16, v_block), 128 if k_block <= 64 else 4096 // k_block), 4, 1)
