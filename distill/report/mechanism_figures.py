"""Figures of how the student works: its plan, the use of its branches and of its state."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from linearize.convert.card_sections import Figure, Table
from linearize.convert.plan import KEEP
from linearize.convert.written import number, percent
from linearize.distill.evaluate.suite import Evaluation
from linearize.distill.report import style
from linearize.distill.report.measurements import Measurements, evaluation_conditions

_OWN = "the teacher's own"
_LAST = len(style.MIXERS) - 1


def plan_strip(measured: Measurements) -> Figure | None:
    """A box per layer and part of it, in the colour of what stands there."""
    plan = measured.layers
    if not plan:
        return None
    parts = {name: [layer.get(part) for layer in plan] for name, part in (("attention", "mixer"), ("MLP", "ffn"))}
    shown = {part: [_OWN if name in (None, KEEP) else str(name) for name in names] for part, names in parts.items()}
    counts = Counter(name for names in shown.values() for name in names if name != _OWN)
    colours = {_OWN: style.TEACHER} | {name: style.MIXERS[min(i, _LAST)] for i, name in enumerate(counts)}
    named = dict(colours)
    if len(counts) > len(style.MIXERS):
        named = {name: colours[name] for name in (_OWN, *list(counts)[:_LAST])} | {"others": style.MIXERS[_LAST]}

    def plot(canvas: Canvas) -> None:
        ax = canvas.add_subplot()
        for row, names in enumerate(shown.values()):
            for layer, name in enumerate(names):
                shade = 0.35 if name == _OWN else 0.95
                ax.add_patch(
                    Rectangle((layer - 0.46, row - 0.42), 0.92, 0.84, facecolor=colours[name], alpha=shade, linewidth=0)
                )
        for name, colour in named.items():
            key = style.short(name, 24)
            ax.add_patch(Rectangle((0, -9), 0, 0, facecolor=colour, alpha=0.35 if name == _OWN else 0.95, label=key))
        style.label(ax, "layer, 0 is next to the embedding", "part of the layer")
        style.layers(ax, len(plan))
        ax.set_ylim(len(shown) - 0.5, -0.5)
        ax.set_yticks(range(len(shown)), list(shown))
        ax.grid(False)
        ax.spines[:].set_visible(False)
        style.legend(canvas, ax, 2)

    rows = [
        (
            str(i),
            _with_options(shown["attention"][i], layer, "options"),
            _with_options(shown["MLP"][i], layer, "ffn_options"),
        )
        for i, layer in enumerate(plan)
    ]
    alt = ", ".join(f"{name} in {n} of {len(plan)} layers" for name, n in counts.items()) or "nothing was replaced"
    caption = f"{len(plan)} layers; options that are not named have their defaults."
    table = Table(("layer", "attention", "MLP"), rows, labels=3)
    return style.figure("plan", "Plan of the layers", alt, caption, table, 118 + 8 * (len(named) + 1), plot)


def _with_options(name: str, layer: dict[str, Any], options: str) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in (layer.get(options) or {}).items())])


def branch_shares(evaluation: Evaluation) -> Figure | None:
    """Per layer: what the recurrence contributes, beside what the teacher looked at outside the window."""
    if (score := evaluation.branches) is None:
        return None
    names = "student: output not the window's", "teacher: attention outside the window"

    def plot(canvas: Canvas) -> None:
        ax = canvas.add_subplot()
        heads = [(layer.layer + 0.2, mass) for layer in score.layers for mass in layer.mass_outside]
        ax.plot(*zip(*heads, strict=True), ".", color=style.INK, markersize=3, label="the same, head by head")
        places = [layer.layer for layer in score.layers]
        shares = [layer.recurrent_share for layer in score.layers]
        masses = [fmean(layer.mass_outside) for layer in score.layers]
        ax.bar([p - 0.2 for p in places], shares, 0.36, color=style.STUDENT, label=names[0])
        ax.bar([p + 0.2 for p in places], masses, 0.36, color=style.TEACHER, alpha=0.6, label=names[1])
        style.label(ax, "layer", "share")
        style.layers(ax, max(places) + 1)
        style.percents(ax)
        ax.set_ylim(bottom=0)
        style.legend(canvas, ax, 1)

    rows = [
        (str(use.layer), f"{use.window:,}", percent(use.recurrent_share), percent(fmean(use.mass_outside)),
         " ".join(percent(mass) for mass in use.mass_outside))
        for use in score.layers
    ]  # fmt: skip
    columns = ("layer", "window, tokens", names[0], f"{names[1]}, mean", "by head")
    alt = "; ".join(f"layer {layer}: {names[0]} {share}, {names[1]} {mass}" for layer, _, share, mass, _ in rows)
    caption = evaluation_conditions(evaluation, f"{score.tokens:,} tokens at a context of {score.context:,}")
    return style.figure("branches", "Use of the two branches", alt, caption, Table(columns, rows), 250, plot)


def state_use(evaluation: Evaluation) -> Figure | None:
    """Effective rank and half-life of every head's state."""
    if (score := evaluation.state) is None:
        return None
    last = max(layer.layer for layer in score.layers)

    def plot(canvas: Canvas) -> None:
        rank, life = canvas.subplots(2, 1)
        ranks = [(layer.layer, value) for layer in score.layers for value in layer.rank]
        lives = [(layer.layer, value) for layer in score.layers for value in layer.half_life if value is not None]
        for ax, points in ((rank, ranks), (life, lives)):
            at, values = [layer for layer, _ in points], [value for _, value in points]
            ax.plot(at, values, "o", color=style.STUDENT, alpha=0.75, label="a head of the student")
        style.label(rank, "layer", "rank, directions")
        style.label(life, "layer", "half-life, tokens")
        style.wide_range(rank, [0])
        style.wide_range(life, [value for _, value in lives])
        for ax in (rank, life):
            style.layers(ax, last + 1)
        style.legend(canvas, rank)

    rows = [
        (str(use.layer), " × ".join(map(str, use.shape)), " ".join(number(round(r, 1)) for r in use.rank),
         " ".join("none" if life is None else f"{life:,.0f}" for life in use.half_life))
        for use in score.layers
    ]  # fmt: skip
    table = Table(("layer", "matrix", "effective rank by head", "half-life by head, tokens"), rows)
    alt = "; ".join(f"layer {layer}: rank {rank}, half-life {life} tokens" for layer, _, rank, life in rows)
    caption = "Heads that forget nothing have no half-life. " + evaluation_conditions(
        evaluation, f"after {score.tokens:,} tokens, forgetting watched over {score.stretch:,} more",
        f"{score.sequences} sequence{'s' if score.sequences > 1 else ''}",
    )  # fmt: skip
    return style.figure("state", "Use of the state", alt, caption, table, 330, plot)
