"""Loss against compute as a power law, `L(C) = β C^α`, fitted to runs of different budgets (arXiv 2406.16690).

The fit is a straight line in `log L` over `log C`; its interval is the usual one of a new observation, with Student's
t for the few runs there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linearize.convert.errors import ConversionError


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        mixer: what it converted to; runs of one mixer are fitted together.
        flops: training compute C.
        loss: held-out nats per token at its end.
    """

    mixer: str
    flops: float
    loss: float


@dataclass(frozen=True)
class PowerLaw:
    """`L(C) = beta · C^alpha`, and what its uncertainty depends on.

    Attributes:
        runs: how many were fitted.
        deviation: standard deviation of log L about the line (with `runs - 2` degrees of freedom; nan for two runs).
        centre: mean of log C. spread: sum of squares of log C about it.
    """

    alpha: float
    beta: float
    runs: int
    deviation: float
    centre: float
    spread: float

    def loss(self, flops: float) -> float:
        """The predicted loss at a compute."""
        return self.beta * flops**self.alpha

    def interval(self, flops: float, level: float = 0.95) -> tuple[float, float]:
        """Where the loss of one new run would lie with probability `level`.

        Raises:
            ConversionError: two runs fix the line but say nothing of its error.
        """
        if self.runs < 3:
            raise ConversionError(f"an interval needs three runs of a mixer at least; there are {self.runs}")
        away = math.log(flops) - self.centre
        error = self.deviation * math.sqrt(1 + 1 / self.runs + away**2 / self.spread)
        reach = student_t_quantile(0.5 + level / 2, self.runs - 2) * error
        predicted = self.loss(flops)
        return predicted * math.exp(-reach), predicted * math.exp(reach)


def fit_power_law(runs: Sequence[Run]) -> PowerLaw:
    """Least squares in logarithms.

    Raises:
        ConversionError: fewer than two different budgets, or a loss or compute that is not positive.
    """
    for run in runs:
        if not (run.flops > 0 and run.loss > 0 and math.isfinite(run.flops) and math.isfinite(run.loss)):
            raise ConversionError(f"{run.mixer}: compute {run.flops} and loss {run.loss} must be positive and finite")
    x, y = np.log([run.flops for run in runs]), np.log([run.loss for run in runs])
    spread = float(((x - x.mean()) ** 2).sum()) if len(runs) else 0.0
    if len(runs) < 2 or spread < 1e-12:
        name = runs[0].mixer if runs else "no mixer"
        raise ConversionError(f"{name}: a power law needs runs of two different budgets at least")
    alpha = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    log_beta = float(y.mean() - alpha * x.mean())
    rest = y - (log_beta + alpha * x)
    deviation = math.sqrt(float((rest**2).sum()) / (len(runs) - 2)) if len(runs) > 2 else math.nan
    return PowerLaw(alpha, math.exp(log_beta), len(runs), deviation, float(x.mean()), spread)


def fit_by_mixer(runs: Sequence[Run]) -> dict[str, PowerLaw]:
    """One law per mixer, in alphabetical order."""
    return {name: fit_power_law([r for r in runs if r.mixer == name]) for name in sorted({r.mixer for r in runs})}


def student_t_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t with `freedom` degrees of freedom stays below with `probability` (in (0.5, 1)).

    With t = √ν tan θ its density is proportional to cos^{ν-1} θ, which is smooth on a finite interval.
    """
    theta = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(theta) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    found = float(np.interp(2 * probability - 1, mass / mass[-1], theta))
    return math.sqrt(freedom) * math.tan(found)
