"""Launch configurations of the Triton kernels: a small table by width and element size, nothing tuned at "
"start-up."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

CHUNK = 64


@dataclass(frozen=True)
class Launch:
    """Block width along the split dimension, warps per program and software pipeline depth."""

    block: int
    warps: int
    stages: int


def padded(width: int) -> int:
    """The power of two, at least 16, that a matrix dimension is padded to."""
    return max(16, 1 << (width - 1).bit_length())


def scan_launch(a_width: int, c_width: int, itemsize: int, *, rowdot: bool = False) -> Launch:
    """`_scan`: the state is `padded(a_width)` by `block`."""
    a_block = padded(a_width)
    if itemsize > 2:  # float32: registers and shared memory are short, and speed is not the point
        return Launch(min(32, padded(c_width)), 8 if a_block > 64 else 4, 1)
    if a_block > 128:
        return Launch(min(64, padded(c_width)), 8, 1)
    if a_block <= 64 and c_width > 128:
        return Launch(128, 4, 2)
    return Launch(min(64, padded(c_width)), 8 if rowdot else 4, 2)


def prepare_launch(width: int, itemsize: int) -> Launch:
    """`_prepare`: `block` key channels at a time."""
    return Launch(min(32, padded(width)), 4, 1)


def finish_launch(k_width: int, v_width: int, itemsize: int) -> tuple[Launch, int]:
    """`_finish`: `block` key channels per program, and how many value channels it reads at a time."""
    block_v = min(64 if itemsize == 2 else 32, padded(v_width))
    return Launch(min(64 if itemsize == 2 else 32, padded(k_width)), 8, 1), block_v


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def segments(programs: int, chunks: int, device: torch.device) -> int:
    """Into how many segments to cut the sequences so that the programs fill the GPU twice over.

    A cut costs a second pass over keys and values, so a GPU that is at least filled once is left alone, and
    a segment is never shorter than eight chunks.
    """
    processors = _multiprocessors(device)
    if programs <= 0 or programs >= processors:
        return 1
    return max(1, min(2 * processors // programs, chunks // 8))


def step_launch(k_width: int, v_width: int) -> Launch:
    """`_step`: `block` value channels of the state, 4096 to 8192 elements, per program."""
    return Launch(max(16, min(8192 // padded(k_width), padded(v_width))), 4, 1)
