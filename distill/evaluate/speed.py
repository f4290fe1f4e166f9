"""Throughput and memory against the length of the context, teacher beside student."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.distill.evaluate.reading import PIECE
from linearize.distill.progress import meter


@dataclass(frozen=True)
class SpeedPoint:
    """One model at one length of context, one sequence.

    Attributes:
        prefill: tokens per second while reading `context` tokens.
        decode: tokens per second, one at a time, after them.
        cache_bytes: what the cache holds after the last token.
        peak_bytes: highest memory while doing so, beyond what was in use before; on CUDA the allocator's, on Linux the
            process's resident memory, elsewhere None.
    """

    model: str
    context: int
    prefill: float
    decode: float
    cache_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class SpeedScore:
    """All points, and how they were measured."""

    points: list[SpeedPoint]
    decoded: int
    threads: int


@torch.no_grad()
def measure_speed(
    models: dict[str, PreTrainedModel], contexts: tuple[int, ...] = (256, 1024, 4096), decoded: int = 32, seed: int = 0
) -> SpeedScore:
    """Time every model at every length on random tokens; the first, untimed run warms up.

    Args:
        decoded: tokens generated one by one after each context.
    """
    points = []
    with meter("speed", len(contexts) * len(models)) as progress:
        for name, model in models.items():
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(model.config.vocab_size, (1, max(contexts) + decoded), generator=generator)
            ids = ids.to(model.device)
            _run(model, ids, min(contexts), 2)
            for context in contexts:
                before = _reset_peak(model.device)
                prefill, decode, cache = _run(model, ids, context, decoded)
                peak = _peak(model.device)
                used = None if peak is None or before is None else max(0, peak - before)
                size = sum(t.nbytes for t in cache_tensors(cache))
                points.append(SpeedPoint(name, context, context / prefill, decoded / decode, size, used))
                progress.update(len(points), context + decoded)
    return SpeedScore(points, decoded, torch.get_num_threads())


def _run(model: PreTrainedModel, ids: torch.Tensor, context: int, decoded: int) -> tuple[float, float, Any]:
    """Seconds of reading and of decoding, and the cache."""
    cache: Any = None
    began = _now(model.device)
    for start in range(0, context, PIECE):
        part = ids[:, start : min(start + PIECE, context)]
        cache = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    read = _now(model.device)
    for step in range(context, context + decoded):
        model(input_ids=ids[:, step : step + 1], past_key_values=cache, use_cache=True)
    return max(read - began, 1e-9), max(_now(model.device) - read, 1e-9), cache


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def cache_tensors(cache: Any) -> list[torch.Tensor]:
    """The tensors a cache holds: keys and values of attention layers, states of mixers."""
    found = []
    for layer in cache.layers:
        held = [
            *(getattr(layer, "state", None) or {}).values(),
            getattr(layer, "keys", None),
            getattr(layer, "values", None),
        ]
        found += [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
    return found


def _reset_peak(device: torch.device) -> int | None:
    """Start counting the peak anew; returns the memory in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier work freed would hide what this one takes
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    except (AttributeError, OSError):
        return None
    return _resident("VmRSS")


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)
