"""Peak memory of a stretch of work."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """Largest memory in bytes: allocated on a GPU, else resident in the process."""

    bytes: int = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure what happens inside. On a CPU the peak counts what was there before; only Linux can start it anew."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text("5")  # forget the peak so far
    try:
        yield peak
    finally:
        if device.type == "cuda":
            peak.bytes = torch.cuda.max_memory_allocated(device)
        else:
            peak.bytes = _resident_peak()


def memory_in_use(device: torch.device) -> int:
    """Bytes now: allocated on a GPU, else resident in the process (its peak where there is no /proc)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS:") or _resident_peak()


def _status(field: str) -> int | None:
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return None


def _resident_peak() -> int:
    if (peak := _status("VmHWM:")) is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
