"""Learning rates over the steps of a stage, relative to the highest."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant", "wsd", "plateau"]

DECAY_SHARE = 0.2
"""Share of the steps that `wsd` (warm-up, stable, decay) spends on its decay."""
PATIENCE_SHARE = 0.05
"""`plateau` compares means over this share of the steps."""
LEAST_GAIN = 1e-3
"""Relative fall of the mean loss that `plateau` takes for progress."""


class RateSchedule:
    """The rate of every step. All but `plateau` are functions of the step alone; `plateau` also of the losses so far.

    cosine, linear: from 1 to `final_rate`. constant: 1. wsd: 1, then over the last fifth linearly to `final_rate`.
    plateau: halves whenever the mean loss of a stretch is no better than the best before, not below `final_rate`.

    Args:
        steps: of the stage.
        warmup: share of the steps during which the rate rises linearly.
        final_rate: the rate at the end, relative to the highest.
    """

    def __init__(self, kind: Schedule, steps: int, warmup: float, final_rate: float) -> None:
        self.kind, self.steps, self.final_rate = kind, steps, final_rate
        self.warm = max(1, round(warmup * steps))
        self.stretch = max(1, round(PATIENCE_SHARE * steps))
        self._best = math.inf
        self._sum, self._seen, self._level = 0.0, 0, 1.0

    def observe(self, loss: float) -> None:
        """Take note of the loss of the next step; steps come in order."""
        self._seen += 1
        if self._seen <= self.warm:
            return
        self._sum += loss
        if (self._seen - self.warm) % self.stretch == 0:
            mean, self._sum = self._sum / self.stretch, 0.0
            if mean > self._best * (1 - LEAST_GAIN):
                self._level = max(self.final_rate, self._level / 2)
            self._best = min(self._best, mean)

    def factor(self, step: int) -> float:
        """The rate of a step (from 0)."""
        if step < self.warm:
            return (step + 1) / self.warm
        if self.kind == "plateau":
            return self._level
        if self.kind == "constant":
            return 1.0
        done = (step - self.warm) / max(1, self.steps - self.warm)
        if self.kind == "cosine":
            shape = 0.5 * (1 + math.cos(math.pi * done))
        else:
            decay = DECAY_SHARE if self.kind == "wsd" else 1.0
            shape = min(1.0, (1 - done) / decay)
        return self.final_rate + (1 - self.final_rate) * shape
