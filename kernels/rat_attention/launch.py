"""Launch configurations of the RAT kernels on the GPU. `tune.py` measures candidates; nothing is tuned at start-up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Rows and columns of a block (queries and summaries where there are both), warps, software pipeline depth."""

    rows: int
    columns: int
    warps: int
    stages: int


# By kernel, for 16-bit elements and widths up to 128. Products in 16 bits need blocks of 64 at least on Hopper.
TABLE: dict[str, Launch] = {
    "attend": Launch(128, 64, 8, 3),
    "queries": Launch(64, 64, 4, 2),
    "chunks": Launch(64, 64, 4, 2),
    # Elements of a tile (rows · width) where nothing is multiplied as matrices.
    "own": Launch(512, 1, 2, 1),
    "own back": Launch(1024, 1, 4, 1),
    "move": Launch(2048, 1, 4, 1),
    "step": Launch(16, 1, 4, 1),
}
# From this many summaries on, torch's own attention takes over the products (16 bits only).
DENSE_FROM = 1024
# How many programs one decoding step should at least be cut into.
STEP_PROGRAMS = 264


def launch(kernel: str, width: int, itemsize: int, little_memory: bool) -> Launch:
    """The configuration of an attention kernel by width, element size and whether shared memory is short."""
    if itemsize > 2:  # float32: registers and shared memory are short, and speed is not the point
        return Launch(32, 32, 4, 1)
    if width > 128:
        return Launch(32, 32, 4, 1) if little_memory else Launch(64, 64, 8, 1)
    return TABLE[kernel]


def width_block(width: int, itemsize: int) -> int:
    """The width, padded for matrix products."""
    block = 16 if itemsize > 2 else 64
    while block < width:
        block *= 2
    return block
