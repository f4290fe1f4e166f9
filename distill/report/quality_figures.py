"""Figures of what the student can do: perplexity by position, needles in haystacks, pairs recalled."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch, Rectangle

from linearize.convert.card_sections import Figure, Table
from linearize.convert.written import number, percent
from linearize.distill.evaluate.needle import Cell, Mode
from linearize.distill.evaluate.suite import Evaluation
from linearize.distill.report import style
from linearize.distill.report.measurements import evaluation_conditions

_WHO = (("student", style.STUDENT, "-"), ("teacher", style.TEACHER, "--"))


def position_curves(evaluation: Evaluation) -> Figure | None:
    """Perplexity of both models in buckets of positions."""
    if (score := evaluation.positions) is None:
        return None
    edges = score.student.edges
    curves = {"student": score.student.perplexity, "teacher": score.teacher.perplexity}

    def plot(canvas: Canvas) -> None:
        ax = canvas.add_subplot()
        middles = [sqrt(start * end) for start, end in pairwise(edges)]
        for who, colour, line in _WHO:
            ax.plot(middles, curves[who], line, color=colour, marker="o", label=who)
        style.label(ax, "position in the text, tokens", "perplexity per token")
        style.lengths(ax, edges[1:])
        style.wide_range(ax, [value for curve in curves.values() for value in curve])
        if score.trained_to and score.trained_to < edges[-1]:
            ax.axvline(score.trained_to, color=style.MUTED, linewidth=1, linestyle=":", label="teacher trained to here")
        style.legend(canvas, ax)

    spans = [f"{start:,} to {end - 1:,}" for start, end in pairwise(edges)]
    rows = [
        (span, number(mine), number(theirs), f"{count:,}")
        for span, mine, theirs, count in zip(spans, *curves.values(), score.student.counts, strict=True)
    ]
    table = Table(("positions", "student", "teacher", "tokens"), rows)
    alt = "; ".join(f"positions {span}: student {mine}, teacher {theirs}" for span, mine, theirs, _ in rows)
    caption = evaluation_conditions(evaluation, f"texts of {edges[-1]:,} tokens, buckets of positions that double")
    return style.figure("positions", "Perplexity by position", alt, caption, table, 240, plot)


def needle_map(evaluation: Evaluation) -> Figure | None:
    """Shares of needles found, by length and depth: student beside teacher, a row per mode."""
    if (score := evaluation.needle) is None:
        return None
    modes: list[Mode] = list(dict.fromkeys(cell.mode for cell in score.cells))

    def plot(canvas: Canvas) -> None:
        panels = canvas.subplots(len(modes), 2, squeeze=False, sharex=True, sharey=True)
        for row, mode in zip(panels, modes, strict=True):
            cells = [cell for cell in score.cells if cell.mode == mode]
            for ax, (who, *_) in zip(row, _WHO, strict=True):
                _grid(ax, cells, who)
                ax.set_title(f"{who}, {mode}")
            row[0].set_ylabel("depth, 0 is the start")
        for ax in panels[-1]:
            ax.set_xlabel("length, tokens")
        key = [Patch(facecolor=style.STUDENT, alpha=_shade(share)) for share in (0, 0.5, 1)]
        style.legend_of(canvas, key, ["0 % found", "50 %", "100 %"])

    rows = [
        (cell.mode, f"{cell.length:,}", f"{cell.depth:g}", percent(cell.student), percent(cell.teacher),
         number(cell.student_nats), number(cell.teacher_nats))
        for cell in score.cells
    ]  # fmt: skip
    columns = ("mode", "length, tokens", "depth", "student found", "teacher found", "student, nats", "teacher, nats")
    alt = "; ".join(
        f"{mode}, weighted by length and distance: student {percent(score.accuracy(mode, 'student'))}, "
        f"teacher {percent(score.accuracy(mode, 'teacher'))}"
        for mode in modes
    )
    needles = f"{score.samples} needle{'s' if score.samples > 1 else ''} per cell"
    caption = evaluation_conditions(
        evaluation, "share of five-digit numbers given back whole, in %", needles, f"chance {number(score.chance)}"
    )
    return style.figure(
        "needle", "Needle in a haystack", alt, caption, Table(columns, rows), 60 + 160 * len(modes), plot
    )


def _shade(share: float) -> float:
    """Strong enough to be seen at 0, weak enough to be written on at 1."""
    return 0.06 + 0.5 * share


def _grid(ax: Axes, cells: list[Cell], who: str) -> None:
    """One heat map: the more of the colour, the more was found; the number stands in the cell."""
    across, down = (list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("length", "depth"))
    for cell in cells:
        share, x, y = getattr(cell, who), across.index(cell.length), down.index(cell.depth)
        ax.add_patch(Rectangle((x, y), 1, 1, facecolor=style.STUDENT, alpha=_shade(share), linewidth=0))
        ax.add_patch(Rectangle((x, y), 1, 1, facecolor="none", edgecolor=style.PAPER, linewidth=1.5))
        if len(across) <= 6:
            ax.text(x + 0.5, y + 0.5, f"{share * 100:.0f}", ha="center", va="center", color=style.INK, fontsize=10)
    ax.set_xlim(0, len(across))
    ax.set_ylim(len(down), 0)
    crowded = len(across) > 3
    ax.set_xticks([i + 0.5 for i in range(len(across))], [f"{n:,}" for n in across], rotation=90 if crowded else 0)
    ax.set_yticks([i + 0.5 for i in range(len(down))], [f"{depth:g}" for depth in down])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def recall_curves(evaluation: Evaluation) -> Figure | None:
    """MQAR: shares of answers right against the number of pairs."""
    if (score := evaluation.mqar) is None:
        return None
    shares = {"student": score.student, "teacher": score.teacher}

    def plot(canvas: Canvas) -> None:
        ax = canvas.add_subplot()
        for who, colour, line in _WHO:
            ax.plot(score.pairs, shares[who], line, color=colour, marker="o", label=who)
        ax.plot(score.pairs, [1 / n for n in score.pairs], ":", color=style.MUTED, linewidth=1.2, label="guessing")
        style.label(ax, "pairs to remember", "answers right")
        style.lengths(ax, score.pairs)
        style.percents(ax)
        ax.set_ylim(bottom=0)
        style.legend(canvas, ax)

    rows = [
        (str(pairs), percent(mine), percent(theirs), percent(1 / pairs))
        for pairs, mine, theirs in zip(score.pairs, score.student, score.teacher, strict=True)
    ]
    alt = "; ".join(f"{pairs} pairs: student {mine}, teacher {theirs}" for pairs, mine, theirs, _ in rows)
    caption = evaluation_conditions(
        evaluation, f"{score.examples} sequences of {score.length:,} random tokens per point, untrained", text=False
    )
    return style.figure(
        "mqar",
        "Recall of pairs (MQAR)",
        alt,
        caption,
        Table(("pairs", "student", "teacher", "guessing"), rows),
        220,
        plot,
    )
