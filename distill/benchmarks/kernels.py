"""Where a step's time goes on a GPU: kernel times by group, and the gaps between kernels."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

_GROUPS = (
    ("softmax attention", r"flash|fmha|sdpa|attention"),
    ("matmul", r"nvjet|gemm|gemv|splitk|cutlass|cublas"),
    ("optimizer", r"multi_tensor|adam|lpnorm"),
    ("copies and casts", r"memcpy|memset|copy|fill|catarray"),
    ("elementwise and norms", r"elementwise|reduce|softmax|norm|index|gather|scatter|scan|triton_|kernel"),
)
_NAME_LENGTH = 100


@dataclass(frozen=True)
class KernelTimes:
    """One step on the GPU, milliseconds.

    Attributes:
        span: from the first kernel's start to the last one's end.
        idle: of it, without any kernel.
        groups: kernel time by group, longest first.
        top: the kernels with most time: name, time, calls.
        kernels: how many ran.
    """

    span: float
    idle: float
    groups: dict[str, float]
    top: list[tuple[str, float, int]]
    kernels: int


def kernel_times(step: Callable[[], Any], wait: Callable[[], Any], top: int = 15) -> KernelTimes:
    """Profile one call of `step`; `wait` waits for the device."""
    wait()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        step()
        wait()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return summarize(events, top)


def summarize(events: list[dict[str, Any]], top: int = 15) -> KernelTimes:
    """From the events of a trace in Chrome's format, microseconds; only what ran on the device counts."""
    ours = triton_families()
    ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    groups: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    for event in ran:
        groups[group_of(event["name"], ours)] += event["dur"] / 1e3
        names[short_name(event["name"])].append(event["dur"] / 1e3)
    busy, end, first = 0.0, 0.0, min((e["ts"] for e in ran), default=0.0)
    for start, stop in sorted((e["ts"], e["ts"] + e["dur"]) for e in ran):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    longest = sorted(((name, sum(times), len(times)) for name, times in names.items()), key=lambda row: -row[1])
    span = max(0.0, end - first) / 1e3
    by_time = dict(sorted(groups.items(), key=lambda item: -item[1]))
    return KernelTimes(span, span - busy / 1e3, by_time, longest[:top], len(ran))


def group_of(name: str, ours: dict[str, str]) -> str:
    """Group of a kernel; our own belong to their family's."""
    if name in ours:
        return "loss kernel" if ours[name] == "linear_loss" else f"mixer kernel: {ours[name]}"
    lower = name.lower()
    return next((group for group, pattern in _GROUPS if re.search(pattern, lower)), "other")


def short_name(name: str) -> str:
    """Without namespaces, which fill most of a C++ kernel's name."""
    plain = re.sub(r"\b(?:at|native|std|cuda|detail|cutlass|void|\(anonymous namespace\)|anonymous)(?:::|\s)", "", name)
    return plain[:_NAME_LENGTH]


def triton_families() -> dict[str, str]:
    """Names of our Triton kernels that are loaded -> their family."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("linearize.kernels."):
            for value in list(vars(module).values()):
                function = getattr(value, "fn", None)
                if type(value).__name__ in ("JITFunction", "Autotuner", "Heuristics") and callable(function):
                    found[getattr(function, "__name__", "")] = module_name.split(".")[2]
    return found
