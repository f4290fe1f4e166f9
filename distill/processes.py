"""Several processes of one conversion: who speaks and writes, what all must know.

Under `accelerate launch` every process runs the whole pipeline. The first one writes, prints and measures; the others
take its results. Without a launcher there is one process, and everything here does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from linearize.convert.errors import ConversionError

T = TypeVar("T")

_LONGEST_WAIT = timedelta(hours=12)
"""The others wait while the first process measures, exports and runs the gate."""


def start(cpu: bool = False) -> None:
    """Join the other processes that the launcher started; does nothing a second time, or without a launcher.

    Args:
        cpu: talk through gloo, on the CPU, although there may be GPUs.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    from accelerate import PartialState  # slow to import, seldom needed

    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # else transformers loads tensors in one process only
    cpu = cpu or not torch.cuda.is_available()
    if cpu and launched_with("DEEPSPEED"):
        PartialState()  # DeepSpeed joins them itself; accelerate takes it for a GPU's
    elif cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        dist.init_process_group("gloo", timeout=_LONGEST_WAIT)
        PartialState(cpu=True)
    else:
        PartialState(timeout=_LONGEST_WAIT)


def launched_with(engine: str) -> bool:
    """Whether the launcher asks for an engine: "DEEPSPEED" or "FSDP"."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false") == "true"


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this process writes and speaks."""
    return rank() == 0


def barrier() -> None:
    """Wait for all processes."""
    if count() > 1:
        dist.barrier()


def on_main(compute: Callable[[], T]) -> T:
    """The result of `compute()`, run in the first process alone; every process gets it. It must be picklable.

    Raises:
        ConversionError: in every process, if the first one raised it. Other errors end the first process, and with it
            the launcher ends the rest.
    """
    if count() == 1:
        return compute()
    answer: list[Any] = [None, None]
    if is_main():
        try:
            answer[0] = compute()
        except ConversionError as error:
            answer[1] = error
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def from_any(value: T | None) -> T | None:
    """The value of the first process that has one."""
    if count() == 1:
        return value
    found: list[Any] = [None] * count()
    dist.all_gather_object(found, value)
    return next((one for one in found if one is not None), None)


def summed(value: torch.Tensor) -> torch.Tensor:
    """The sum over processes, in every one of them; without gradient."""
    value = value.detach().clone()
    if count() > 1:
        dist.all_reduce(value)
    return value


_share: float | None = None


@contextmanager
def part_of_batch(share: float) -> Iterator[None]:
    """Context: this process computes the loss of this share of the sequences that all compute at once."""
    global _share
    before, _share = _share, share
    try:
        yield
    finally:
        _share = before


def common(total: torch.Tensor) -> torch.Tensor:
    """A total over this process's sequences -> its share of the total over all processes' sequences.

    A loss that divides by such a total then has, weighted by the shares, the mean that one process would find.
    """
    if _share is None or count() == 1:
        return total
    return summed(total if _share else torch.zeros_like(total)) * (_share or 1.0)


def stop() -> None:
    """Leave the other processes, at the end of everything."""
    if dist.is_initialized():
        dist.destroy_process_group()
