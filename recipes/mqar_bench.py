"""MQAR for a list of mixers, results kept in a file as they are made."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from linearize.convert.mixers import MIXERS
from linearize.convert.plan import make_plan
from linearize.distill.device import choose_device
from linearize.distill.evaluate.mqar import Task
from linearize.distill.evaluate.mqar_training import Outcome, Training, train_on_mqar


def bench_mqar(
    mixers: Sequence[str],
    task: Task,
    training: Training,
    device: str = "auto",
    out: Path = Path("bench-mqar.json"),
    jobs: int = 1,
) -> list[Outcome]:
    """Train every mixer; `out` is written after each.

    Args:
        mixers: names; empty for every registered mixer.
        out: outcomes in it that were made with the same settings are not made again; others are replaced.
        jobs: mixers trained at a time, each in a process of its own. One such model keeps a GPU busy only in part.

    Raises:
        ConversionError: a mixer does not exist; said before any is trained.
    """
    device = choose_device(device)
    names = list(mixers) or sorted(MIXERS)
    for name in names:
        make_plan(training.layers, name)
    settings = json.loads(json.dumps({"task": asdict(task), "training": asdict(training)}))
    done = _read(out, settings)
    for outcome in _trained([name for name in names if name not in done], task, training, device, jobs):
        done[outcome.mixer] = outcome
        outcomes = [outcome.to_json() for outcome in done.values()]
        out.write_text(json.dumps({**settings, "device": device, "outcomes": outcomes}, indent=1))
    return [done[name] for name in names]


def _trained(names: Sequence[str], task: Task, training: Training, device: str, jobs: int) -> Iterator[Outcome]:
    """Outcomes as they are made."""
    if jobs == 1:
        yield from (train_on_mqar(name, task, training, device) for name in names)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    spawn = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        runs = [pool.submit(train_on_mqar, name, task, training, device) for name in names]
        try:
            yield from (run.result() for run in as_completed(runs))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _read(file: Path, settings: dict[str, Any]) -> dict[str, Outcome]:
    if not file.is_file():
        return {}
    stored = json.loads(file.read_text())
    if any(stored.get(key) != value for key, value in settings.items()):
        return {}
    return {data["mixer"]: Outcome.from_json(data) for data in stored["outcomes"]}
