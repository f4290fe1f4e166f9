"""Which implementation of a kernel runs: one rule for every family.

`backend="auto"` takes Triton for CUDA tensors where the family has a Triton path and Triton can be imported,
and the chunked plain-torch form everywhere else. Asking for a backend by name either gets that backend or an
error that says why it can't run here; nothing is substituted silently.
"""

from __future__ import annotations

import functools
import os
from typing import Literal, get_args

import torch

Backend = Literal["auto", "triton", "chunked", "reference"]


@functools.cache
def _triton_import_error() -> str | None:
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken install raises more than ImportError
        return f"{type(error).__name__}: {error}"
    return None


def triton_interpreted() -> bool:
    """Whether Triton kernels run in its CPU interpreter (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def why_no_triton(device: torch.device, has_triton: bool = True) -> str | None:
    """The reason the Triton path can't run on `device`, or None if it can."""
    if not has_triton:
        return "this operation has no Triton kernel"
    problem = _triton_import_error()
    if problem is not None:
        return f"triton can't be imported ({problem}); install it with `pip install triton`"
    if device.type == "cuda":
        return None
    if device.type == "cpu" and triton_interpreted():
        return None
    return f"the tensors are on {device}; use a CUDA device, or set TRITON_INTERPRET=1 to test on the CPU"


def resolve_backend(
    backend: str, device: torch.device, *, operation: str, has_triton: bool = True
) -> Literal["triton", "chunked", "reference"]:
    """Turn the user's `backend` into the one that runs.

    Raises:
        ValueError: `backend` is not one of the four names.
        RuntimeError: the named backend can't run on `device`; the message says why.
    """
    if backend == "auto":
        # The interpreter is for tests: "auto" never picks it, since the chunked form is much faster on a CPU.
        if device.type == "cuda" and why_no_triton(device, has_triton) is None:
            return "triton"
        return "chunked"
    if backend == "triton":
        reason = why_no_triton(device, has_triton)
        if reason is not None:
            raise RuntimeError(f'{operation}: backend="triton" can\'t run here: {reason}')
        return "triton"
    if backend == "chunked":
        return "chunked"
    if backend == "reference":
        return "reference"
    known = ", ".join(f'"{name}"' for name in get_args(Backend))
    raise ValueError(f'{operation}: backend is "{backend}"; use one of {known}')
