"""MQAR for a list of mixers, results kept in a file as they are made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from linearize.convert.mixers import MIXERS
from linearize.convert.plan import make_plan
from linearize.distill.device import choose_device
from linearize.distill.evaluate.mqar import Task
from linearize.distill.evaluate.mqar_training import Outcome, Training, train_on_mqar


def bench_mqar(
    mixers: Sequence[str], task: Task, training: Training, device: str = "auto", out: Path = Path("bench-mqar.json")
) -> list[Outcome]:
    """Train every mixer; `out` is written after each.

    Args:
        mixers: names; empty for every registered mixer.
        out: outcomes in it that were made with the same settings are not made again; others are replaced.

    Raises:
        ConversionError: a mixer does not exist; said before any is trained.
    """
    device = choose_device(device)
    names = list(mixers) or sorted(MIXERS)
    for name in names:
        make_plan(training.layers, name)
    settings = json.loads(json.dumps({"task": asdict(task), "training": asdict(training)}))
    done = _read(out, settings)
    for name in names:
        if name not in done:
            done[name] = train_on_mqar(name, task, training, device)
            outcomes = [outcome.to_json() for outcome in done.values()]
            out.write_text(json.dumps({**settings, "device": device, "outcomes": outcomes}, indent=1))
    return [done[name] for name in names]


def _read(file: Path, settings: dict[str, Any]) -> dict[str, Outcome]:
    if not file.is_file():
        return {}
    stored = json.loads(file.read_text())
    if any(stored.get(key) != value for key, value in settings.items()):
        return {}
    return {data["mixer"]: Outcome.from_json(data) for data in stored["outcomes"]}
