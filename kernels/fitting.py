"""Launches that fit the GPU at hand.

The tables of launch configurations were measured on a GPU with 227 KiB of shared memory per block. Others have 163 (A100)
or 99 KiB (RTX 30 and 40, A10, L4, L40); there a kernel that does not fit runs with a shorter pipeline, and tables have smaller
blocks where even that would not do.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from triton import OutOfResources
from triton.runtime import driver

from linearize.kernels.dispatch import triton_interpreted

_SHORTER: dict[Hashable, int] = {}
"""Launches that did not fit as the table has them -> pipeline stages with which they do."""


def little_shared_memory() -> bool:
    """Whether the current GPU has less than an A100."""
    return not triton_interpreted() and _shared_memory(driver.active.get_current_device()) < 160 * 1024


@functools.cache
def _shared_memory(device: int) -> int:
    """Bytes that a block may have."""
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"])


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, with fewer than `options["num_stages"]` where shared memory is too small.

    Raises:
        RuntimeError: not even one stage fits.
    """
    key: Hashable = None
    if _SHORTER:  # else nothing is looked up: most GPUs are large enough
        key = _key(kernel, args, options)
        options["num_stages"] = _SHORTER.get(key, options["num_stages"])
    while True:
        try:
            kernel[grid](*args, **options)
            return
        except OutOfResources as error:
            if error.name != "shared memory" or options["num_stages"] <= 1:
                raise RuntimeError(
                    f"{kernel.__name__} needs {error.required:,} of {error.name}, of which this GPU has {error.limit:,}: its "
                    'heads are too wide for it; pass backend="chunked" or take a GPU with more'
                ) from error
            key = key or _key(kernel, args, options)
            options["num_stages"] -= 1
            _SHORTER[key] = options["num_stages"]


def _key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Hashable:
    tensor = next(x for x in args if isinstance(x, torch.Tensor))
    return (
        id(kernel),
        tensor.device,
        tensor.dtype,
        tuple(sorted((k, v) for k, v in options.items() if k != "num_stages")),
    )
