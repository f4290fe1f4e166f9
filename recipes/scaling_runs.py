"""`linearize scaling fit`: runs read from exported students or tables, one power law per mixer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from linearize.convert.errors import ConversionError
from linearize.convert.export import RECORD
from linearize.distill.scaling import PowerLaw, Run, fit_by_mixer


@dataclass(frozen=True)
class ScalingFit:
    """Laws per mixer, and what they predict.

    Attributes:
        at: compute of the prediction; None for ten times the largest run's.
        predictions: mixer -> (loss, low, high); low and high are None where fewer than three runs were given.
    """

    runs: list[Run]
    laws: dict[str, PowerLaw]
    at: float
    level: float
    predictions: dict[str, tuple[float, float | None, float | None]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        lines = [f"L(C) = beta C^alpha; {self.level:.0%} interval at C = {self.at:.3g} FLOPs"]
        lines.append(f"{'mixer':18s}{'runs':>5s}{'alpha':>10s}{'beta':>10s}{'loss':>9s}{'low':>9s}{'high':>9s}")
        for name, law in self.laws.items():
            loss, low, high = self.predictions[name]
            ends = [f"{end:9.4f}" if end is not None else f"{'-':>9s}" for end in (low, high)]
            lines.append(f"{name:18s}{law.runs:5d}{law.alpha:10.4f}{law.beta:10.3f}{loss:9.4f}{''.join(ends)}")
        return "\n".join(lines)


def read_run(source: Path) -> list[Run]:
    """Runs of an exported student (`C = 6 · parameters · training tokens`), or of a JSONL table.

    A line of a table is `{"mixer": ..., "flops": ..., "loss": ...}`.

    Raises:
        ConversionError: neither.
    """
    if source.is_dir():
        file = source / RECORD
        if not file.is_file():
            raise ConversionError(f"{source} is not an exported student: it has no {RECORD}")
        summary = json.loads(file.read_text()).get("summary")
        if not summary or not sum(summary["tokens"].values()):
            raise ConversionError(f"{file} has no measurements of a training run; convert again")
        trained = [count for stage, count in summary["tokens"].items() if not stage.startswith("control")]
        return [Run(summary["to"], 6.0 * summary["parameters"]["total"] * sum(trained), summary["loss"]["student"])]
    if not source.is_file():
        raise ConversionError(f"{source}: no such student folder or table")
    runs = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                runs.append(Run(str(row["mixer"]), float(row["flops"]), float(row["loss"])))
            except (ValueError, KeyError, TypeError):
                reason = 'not of the form {"mixer": ..., "flops": ..., "loss": ...}'
                raise ConversionError(f"{source}, line {number}: {reason}") from None
    return runs


def fit_runs(sources: Sequence[Path], at: float | None = None, level: float = 0.95) -> ScalingFit:
    """Fit every mixer among the runs and predict at one compute.

    Raises:
        ConversionError: a source cannot be read, or a mixer has runs of one budget only.
    """
    runs = [run for source in sources for run in read_run(source)]
    laws = fit_by_mixer(runs)
    at = at or 10 * max(run.flops for run in runs)
    predictions = {}
    for name, law in laws.items():
        low, high = law.interval(at, level) if law.runs > 2 else (None, None)
        predictions[name] = (law.loss(at), low, high)
    return ScalingFit(runs, laws, at, level, predictions)
