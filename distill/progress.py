"""Progress of a long step: a bar on a terminal, a line now and then elsewhere. Always on standard error."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from linearize.distill import processes

_SECONDS_BETWEEN_LINES = 10.0


@dataclass
class Meter:
    """Reports steps of one task: loss, tokens per second, time left."""

    name: str
    steps: int
    bar: Progress | None
    start: int = 0
    began: float = field(default_factory=time.perf_counter)
    last_line: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.bar is not None:
            self.task = self.bar.add_task(self.name, total=self.steps, completed=self.start, status="")

    def update(self, step: int, tokens_per_step: int, loss: float | None = None, memory: int | None = None) -> None:
        """After `step` steps in all; `memory` in bytes."""
        now = time.perf_counter()
        done = step - self.start
        rate = done / max(now - self.began, 1e-9)
        status = "" if loss is None else f"loss {loss:.4f}  "
        status += f"{rate * tokens_per_step:,.0f} tokens/s"
        status += "" if memory is None else f"  {memory / 2**30:.1f} GiB"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, status=status)
        elif now - self.last_line > _SECONDS_BETWEEN_LINES or step == self.steps:
            self.last_line = now
            left = (self.steps - step) / max(rate, 1e-9)
            say(f"{self.name}: step {step}/{self.steps}  {status}  {left:.0f} s left")


@contextmanager
def meter(name: str, steps: int, start: int = 0) -> Iterator[Meter]:
    """A `Meter` for one task, its bar removed at the end. Of several processes, the first one shows it.

    Workers of a pool, each with a task of its own, print lines.
    """
    console = Console(stderr=True)
    if not console.is_terminal or not processes.is_main() or multiprocessing.parent_process() is not None:
        yield Meter(name, steps, None, start)
        return
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")]
    columns += [TextColumn("{task.fields[status]}"), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True) as bar:
        yield Meter(name, steps, bar, start)


def say(message: str) -> None:
    """One line on standard error, of the first process."""
    if processes.is_main():
        print(message, file=sys.stderr, flush=True)
