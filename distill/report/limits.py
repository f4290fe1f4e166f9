"""Known limits that an evaluation shows, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from linearize.convert.written import number, percent
from linearize.distill.evaluate.language import perplexity
from linearize.distill.evaluate.suite import Evaluation
from linearize.distill.report.measurements import Measurements

NEARLY_A_WINDOW = 0.05
"""A smaller mean share of the recurrence in the output is worth a warning."""

TESTED_FAMILIES = ("gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Model types that the package's own tests convert; others are found by their structure."""

_FEW_NEEDLES = 10


def measured_limits(measured: Measurements) -> list[str]:
    """What a user should know before relying on this student."""
    limits = []
    if measured.family is not None and measured.family not in TESTED_FAMILIES:
        known = ", ".join(TESTED_FAMILIES)
        limits.append(f"The family {measured.family} is none that the package is tested with ({known}).")
    if (evaluation := measured.evaluation) is None:
        return [*limits, "Recall, speed and use of the branches were not measured; `linearize eval DIR` does."]
    found = (_branches, _positions, _recall, _speed)
    return [*limits, *(sentence for part in found for sentence in part(evaluation))]


def _branches(evaluation: Evaluation) -> Iterator[str]:
    if (score := evaluation.branches) is None:
        return
    share = fmean(layer.recurrent_share for layer in score.layers)
    both, alone = (perplexity(score.loss[use]) for use in ("both", "window"))
    text = (
        f"The recurrence makes {percent(share)} of the hybrid layers' output on average; "
        f"with the window alone perplexity is {number(alone)} in place of {number(both)}"
    )
    yield f"**{text}**: this student is close to a sliding window." if share < NEARLY_A_WINDOW else f"{text}."


def _positions(evaluation: Evaluation) -> Iterator[str]:
    if (score := evaluation.positions) is None or not score.trained_to:
        return
    curve = score.student
    known = [p for start, p in zip(curve.edges, curve.perplexity, strict=False) if start < score.trained_to]
    beyond = [p for start, p in zip(curve.edges, curve.perplexity, strict=False) if start >= score.trained_to]
    if beyond and beyond[-1] > 1.1 * known[-1]:
        yield (
            f"Perplexity grows beyond the teacher's {score.trained_to:,} trained positions: "
            f"{number(known[-1])} before, {number(beyond[-1])} up to {curve.edges[-1]:,}."
        )


def _recall(evaluation: Evaluation) -> Iterator[str]:
    if (score := evaluation.needle) is None:
        return
    for mode in dict.fromkeys(cell.mode for cell in score.cells):
        mine, theirs = (score.accuracy(mode, who, weighted=False) for who in ("student", "teacher"))
        if mine < theirs:
            yield f"Finds {percent(mine)} of the needles of the {mode} mode, its teacher {percent(theirs)}."
        elif theirs <= score.chance:
            yield f"Its teacher finds no needle of the {mode} mode, so nothing is known of recall by that test."
    if score.samples < _FEW_NEEDLES:
        yield f"Only {score.samples} needle{'s' if score.samples > 1 else ''} per cell: single cells say little."


def _speed(evaluation: Evaluation) -> Iterator[str]:
    if (score := evaluation.speed) is None:
        return
    points = {(point.model, point.context): point for point in score.points}
    for phase, name in (("prefill", "reading"), ("decode", "generating")):
        slower = [
            context for who, context in points
            if who == "student" and ("teacher", context) in points
            and getattr(points[who, context], phase) < getattr(points["teacher", context], phase)
        ]  # fmt: skip
        if slower:
            yield (
                f"Slower than its teacher at {name} at a context of {', '.join(f'{c:,}' for c in slower)} tokens "
                f"({evaluation.conditions.device}, {evaluation.conditions.dtype})."
            )
