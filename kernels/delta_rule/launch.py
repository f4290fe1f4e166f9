"""Launch configurations of the delta rule's Triton kernels: a small table by width and element size, nothing tuned at
start-up. Blocks are never narrower than linear attention's table allows (see there)."""

from __future__ import annotations

from linearize.kernels.linear_attention.launch import CHUNK, Launch, padded, step_launch

__all__ = ["CHUNK", "Launch", "finish_launch", "padded", "prepare_launch", "scan_launch", "step_launch"]


def prepare_launch(k_width: int, v_width: int, itemsize: int) -> tuple[Launch, int]:
    """`_prepare`: `block` key channels at a time, and how many value channels."""
    widest = 64 if itemsize == 2 else 32
    return Launch(min(widest, padded(k_width, itemsize)), 4, 1), min(widest, padded(v_width, itemsize))


def scan_launch(k_width: int, v_width: int, itemsize: int, *, backward: bool = False) -> Launch:
    """`_scan` and `_scan_back`: the state is `padded(k_width)` by `block`."""
    k_block, v_block = padded(k_width, itemsize), padded(v_width, itemsize)
    if itemsize > 2:  # float32: registers and shared memory are short, and speed is not the point
        return Launch(min(16 if k_block > 128 else 32, v_block), 8 if k_block > 64 else 4, 1)
    if k_block > 128:
        return Launch(64, 8, 1)
    return Launch(64, 4, 1 if backward and k_block > 64 else 2)


def finish_launch(k_width: int, v_width: int, itemsize: int) -> tuple[Launch, int]:
    """`_finish`: `block` key channels at a time, and how many value channels."""
    k_block, v_block = padded(k_width, itemsize), padded(v_width, itemsize)
    if itemsize > 2:
        return Launch(min(32, k_block), 8, 1), min(32, v_block)
    return Launch(64, 8, 2), min(128, v_block)
