"""Figures of what the student costs: speed and memory against the length of the context."""

from __future__ import annotations

from typing import Literal

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, NullLocator

from linearize.convert.card_sections import Figure, Table
from linearize.convert.written import number, size
from linearize.distill.evaluate.suite import Evaluation
from linearize.distill.report import style
from linearize.distill.report.measurements import Measurements, evaluation_conditions

_WHO = (("student", style.STUDENT, "-"), ("teacher", style.TEACHER, "--"))


def speed_curves(evaluation: Evaluation, phase: Literal["prefill", "decode"]) -> Figure | None:
    """Tokens per second of both models."""
    if (score := evaluation.speed) is None:
        return None
    contexts = sorted({point.context for point in score.points})
    speeds = {
        who: {point.context: getattr(point, phase) for point in score.points if point.model == who} for who, *_ in _WHO
    }

    def plot(canvas: Canvas) -> None:
        ax = canvas.add_subplot()
        for who, colour, line in _WHO:
            ax.plot(list(speeds[who]), list(speeds[who].values()), line, color=colour, marker="o", label=who)
        style.label(ax, "context, tokens", "tokens per second")
        style.lengths(ax, contexts)
        style.wide_range(ax, [0])
        style.legend(canvas, ax)

    rows = []
    for context in contexts:
        mine, theirs = speeds["student"].get(context), speeds["teacher"].get(context)
        ratio = f"{mine / theirs:.2f}×" if mine and theirs else "—"
        rows.append((f"{context:,}", number(mine), number(theirs), ratio))
    columns = ("context, tokens", "student, tokens/s", "teacher, tokens/s", "student / teacher")
    alt = "; ".join(
        f"at {at} tokens: student {mine}, teacher {theirs} tokens per second" for at, mine, theirs, _ in rows
    )
    title, done = {
        "prefill": ("Speed of reading", "reading one sequence of random tokens"),
        "decode": (
            "Speed of generation",
            f"generating {score.decoded} tokens one by one after the context, one sequence",
        ),
    }[phase]
    caption = evaluation_conditions(evaluation, done, text=False)
    return style.figure(phase, title, alt, caption, Table(columns, rows), 225, plot)


def memory_curves(measured: Measurements) -> Figure | None:
    """Bytes that one sequence holds: as measured, and as computed from the shapes by the conversion."""
    speed = measured.evaluation.speed if measured.evaluation else None
    found: dict[tuple[str, str], dict[int, int]] = {}
    for point in speed.points if speed else ():
        found.setdefault((point.model, "measured"), {})[point.context] = point.cache_bytes
    for who, name in (("student", "state_bytes"), ("teacher", "kv_bytes")):
        for context, size_ in (measured.record.get(name) or {}).items():
            found.setdefault((who, "computed"), {})[int(context)] = size_
    if not found:
        return None
    contexts = sorted({context for values in found.values() for context in values})

    def plot(canvas: Canvas) -> None:
        ax = canvas.add_subplot()
        for who, colour, line in _WHO:
            computed, seen = found.get((who, "computed"), {}), found.get((who, "measured"), {})
            both = sorted({**computed, **seen}.items())
            ax.plot(*zip(*both, strict=True), line, color=colour, label=who)
            ax.plot(list(seen), list(seen.values()), "o", color=colour)
            ax.plot(list(computed), list(computed.values()), "o", color=colour, markerfacecolor=style.PAPER)
        ax.set_yscale("log", base=2)
        style.label(ax, "context, tokens", "bytes per sequence")
        style.lengths(ax, contexts)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(round(value))))
        ax.yaxis.set_minor_locator(NullLocator())
        style.legend(canvas, ax)

    peaks = {(p.model, p.context): p.peak_bytes for p in speed.points} if speed else {}
    rows = [
        (who, how, f"{context:,}", f"{bytes_:,}", size(bytes_), size(peaks.get((who, context)) if how == "measured" else None))
        for (who, how), values in found.items()
        for context, bytes_ in sorted(values.items())
    ]  # fmt: skip
    columns = ("model", "how", "context, tokens", "bytes held", "", "highest while running")
    alt = "; ".join(f"{who} at {at} tokens: {written} ({how})" for who, how, at, _, written, _ in rows)
    caption = "What the cache of one sequence holds; hollow points are computed from shapes."
    if measured.evaluation and speed:
        caption += f" Filled ones are measured, {speed.decoded} tokens after the context."
        caption += " " + evaluation_conditions(measured.evaluation, text=False)
    elif dtype := measured.record.get("dtype"):
        caption += f" In {dtype}."
    return style.figure("memory", "Memory of one sequence", alt, caption, Table(columns, rows, labels=2), 225, plot)
