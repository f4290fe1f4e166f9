"""The curve of a training run: a CSV file, and whatever trackers the recipe names."""

from __future__ import annotations

import csv
import importlib.util
import os
from pathlib import Path
from typing import Any, Literal

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from linearize.convert.errors import ConversionError

Tracker = Literal["tensorboard", "wandb", "trackio"]
CURVES = "losses.csv"
EVENTS = "tensorboard"
"""Folder of tensorboard's files."""
COLUMNS = ("stage", "step", "loss", "rate", "tokens_per_second", "memory_bytes")


def check_trackers(names: tuple[Tracker, ...]) -> None:
    """Raise `ConversionError` if a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConversionError(f"--report-to {name}: it is not installed; pip install {name}")


class LossLog:
    """Rows of `COLUMNS`, one per step: `rate` relative to the highest, memory as `memory_in_use` counts it.

    Args:
        folder: of `losses.csv`, where all stages of a run write, and of tensorboard's files.
        stage: name of this stretch of training.
        start: steps that are kept; rows of this stage after them were made by a run that was killed.
    """

    def __init__(self, folder: Path, stage: str, start: int, report_to: tuple[Tracker, ...] = ()) -> None:
        check_trackers(report_to)
        self.stage, self.file = stage, folder / CURVES
        rows = [row for row in read_rows(self.file) if row[0] != stage or int(row[1]) <= start]
        folder.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".csv.tmp")
        with open(temporary, "w", newline="") as handle:
            csv.writer(handle).writerows([COLUMNS, *rows])
        os.replace(temporary, self.file)
        self._handle = open(self.file, "a", newline="", buffering=1)  # noqa: SIM115  closed by close()
        self._csv = csv.writer(self._handle)
        self._trackers = [_tracker(name, folder, stage) for name in report_to]

    def row(self, step: int, loss: float, rate: float, tokens_per_second: float, memory: int) -> None:
        """After `step` steps of the stage."""
        self._csv.writerow([self.stage, step, repr(loss), f"{rate:.6g}", f"{tokens_per_second:.1f}", memory])
        values = {"loss": loss, "rate": rate, "tokens_per_second": tokens_per_second, "memory_bytes": memory}
        for tracker in self._trackers:
            tracker.log({f"{self.stage}/{key}": value for key, value in values.items()}, step=step)

    def close(self) -> None:
        self._handle.close()
        for tracker in self._trackers:
            tracker.finish()


def read_rows(file: Path) -> list[list[str]]:
    """The whole rows of a `losses.csv`; none if it is not there. A row that a kill cut short is left out."""
    if not file.is_file():
        return []
    with open(file, newline="") as handle:
        return [row for row in list(csv.reader(handle))[1:] if len(row) == len(COLUMNS)]


def _tracker(name: Tracker, folder: Path, stage: str) -> Any:
    PartialState()  # trackers ask it which process they are in
    kind: Any = LOGGER_TYPE_TO_CLASS[name]
    project = folder.name.removesuffix(".partial") or "linearize"
    options = {"logging_dir": str(folder / EVENTS)} if name == "tensorboard" else {"name": stage}
    tracker = kind(stage if name == "tensorboard" else project, **options)
    tracker.start()
    return tracker
