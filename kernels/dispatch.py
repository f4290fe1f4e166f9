"""Which implementation of a kernel runs: one rule for every family.

`backend="auto"` takes Triton for CUDA tensors where the family has a Triton path and Triton can be imported,
and the chunked plain-torch form everywhere else. Asking for a backend by name either gets that backend or an
error that says why it can't run here; nothing is substituted silently.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import Literal, get_args

import torch

Backend = Literal["auto", "triton", "chunked", "reference"]


# Looked for, not imported: that would cost every CPU user half a second.
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def triton_interpreted() -> bool:
    """Whether Triton kernels run in its CPU interpreter (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def why_no_triton(device: torch.device) -> str | None:
    """The reason Triton kernels can't run on `device`, or None if they can."""
    if not _TRITON_INSTALLED:
        return "triton is not installed; install it with `pip install triton`"
    if device.type == "cuda" or (device.type == "cpu" and triton_interpreted()):
        return None
    return f"the tensors are on {device}; use a CUDA device, or set TRITON_INTERPRET=1 to test on the CPU"


def resolve_backend(
    backend: str, device: torch.device, *, operation: str, unsupported: str | None = None
) -> Literal["triton", "chunked", "reference"]:
    """Turn the user's `backend` into the one that runs.

    Args:
        backend: what the user asked for.
        device: where the tensors are.
        operation: the public function's name, for messages.
        unsupported: why this call has no Triton kernel, or None if it has one.

    Raises:
        ValueError: `backend` is not one of the four names.
        RuntimeError: the named backend can't run here; the message says why.
    """
    if backend == "auto":
        # The interpreter is for tests: "auto" never picks it, since the chunked form is much faster on a CPU.
        if device.type == "cuda" and unsupported is None and why_no_triton(device) is None:
            return "triton"
        return "chunked"
    if backend == "triton":
        reason = unsupported or why_no_triton(device)
        if reason is not None:
            raise RuntimeError(f'{operation}: backend="triton" can\'t run here: {reason}')
        return "triton"
    if backend == "chunked":
        return "chunked"
    if backend == "reference":
        return "reference"
    known = ", ".join(f'"{name}"' for name in get_args(Backend))
    raise ValueError(f'{operation}: backend is "{backend}"; use one of {known}')


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current CUDA device: make it the tensor's."""
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
