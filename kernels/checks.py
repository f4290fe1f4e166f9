"""Argument validation shared by the kernels: one clear line naming the argument, its value and the fix."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(
    operation: str, name: str, value: object, shape: Sequence[int | str], dims: dict[str, int]
) -> Tensor:
    """Check that `value` is a tensor of `shape`, whose letters are looked up in, or added to, `dims`."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{operation}: {name} is {type(value).__name__}; pass a tensor of shape {_spell(shape)}"
        )
    if value.dim() != len(shape):
        raise ValueError(
            f"{operation}: {name} has shape {tuple(value.shape)}; it must be {_spell(shape)} ({len(shape)} "
            "dimensions)"
        )
    for axis, want in enumerate(shape):
        have = value.shape[axis]
        if isinstance(want, str):
            if want in dims and dims[want] != have:
                raise ValueError(
                    f"{operation}: {name} has shape {tuple(value.shape)}; it must be {_spell(shape)} with "
                    f"{want}={dims[want]} (dimension {axis} is {have})"
                )
            dims[want] = have
        elif have != want:
            raise ValueError(
                f"{operation}: {name} has shape {tuple(value.shape)}; dimension {axis} must be {want}, not "
                f"{have}"
            )
    return value


def check_float(operation: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Check that each tensor given has a floating-point dtype the kernels know."""
    for name, value in tensors.items():
        if value is not None and value.dtype not in _FLOAT_DTYPES:
            raise TypeError(
                f"{operation}: {name} has dtype {value.dtype}; convert it to float16, bfloat16, float32 or "
                "float64"
            )


def check_same_device(operation: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Check that all tensors given live on one device."""
    first: tuple[str, torch.device] | None = None
    for name, value in tensors.items():
        if value is None:
            continue
        if first is None:
            first = (name, value.device)
        elif value.device != first[1]:
            raise ValueError(
                f"{operation}: {name} is on {value.device} but {first[0]} is on {first[1]}; move them to one "
                "device"
            )


def check_log_decay_sign(operation: str, log_decay: Tensor) -> None:
    """Check that no log decay is positive. Only on the CPU: on a GPU it would make the host wait."""
    if _readable(log_decay) and log_decay.numel() > 0:
        largest = float(log_decay.detach().max())
        if largest > 0:
            raise ValueError(
                f"{operation}: log_decay has a positive value ({largest:.4g}); it is the natural logarithm "
                "of a decay in "
                "(0, 1], so pass values <= 0 (for example logsigmoid of a gate)"
            )


def check_cu_seqlens(operation: str, cu_seqlens: Tensor, batch: int, time: int) -> int:
    """Check the cumulative lengths of packed sequences; return the number of sequences.

    The values are read only on the CPU, where that costs nothing.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        shape = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(
            f"{operation}: cu_seqlens is {shape}; it must be a 1-D integer tensor [0, n1, n1+n2, ...]"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{operation}: cu_seqlens has dtype {cu_seqlens.dtype}; convert it to int32 or int64")
    if batch != 1:
        raise ValueError(
            f"{operation}: with cu_seqlens the sequences are packed along time, so the batch must be 1, not "
            f"{batch}"
        )
    if _readable(cu_seqlens):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != time or any(b < a for a, b in itertools.pairwise(bounds)):
            raise ValueError(
                f"{operation}: cu_seqlens must start at 0, never decrease and end at T={time}; it is "
                f"{_shorten(bounds)}"
            )
    return cu_seqlens.numel() - 1


def _readable(tensor: Tensor) -> bool:
    """Whether looking at values costs nothing: on the CPU, and not while torch.compile traces."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _spell(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _shorten(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{values[0]}, {values[1]}, ..., {values[-2]}, {values[-1]}]"
