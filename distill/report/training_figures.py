"""Figures of the training: the loss of every stage, and how far every layer is from the teacher's attention."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from linearize.convert.card_sections import Figure, Table
from linearize.convert.written import number
from linearize.distill.report import style
from linearize.distill.report.measurements import Measurements, conversion_conditions

_POINTS = 200
"""Of a longer curve, means of equal stretches are drawn."""

_CONTROL = "control_"
_UNITS = {"transfer": "relative squared error", "hidden": "relative squared error", "matrix": "Frobenius distance"}
_CHOSEN_UNITS = {"mse": "mean squared error", "l2": "distance per token"}


def loss_curves(measured: Measurements) -> Figure | None:
    """A panel per stage, as they minimise different things."""
    stages = [name for name, values in measured.losses.items() if values and not name.startswith(_CONTROL)]
    if not stages:
        return None
    stretch = {name: max(1, -(-len(measured.losses[name]) // _POINTS)) for name in stages}

    def plot(canvas: Canvas) -> None:
        panels = canvas.subplots(len(stages), 1, squeeze=False)[:, 0]
        for ax, name in zip(panels, stages, strict=True):
            beside = measured.losses.get(_CONTROL + name, [])
            for series, colour, who in (
                (beside, style.CONTROL, "control: window alone"),
                (measured.losses[name], style.STUDENT, "student"),
            ):
                if series:
                    ends, means = _means(series, stretch[name])
                    ax.plot(ends, means, color=colour, label=who, marker="o" if len(ends) == 1 else None)
            style.label(ax, "optimizer steps", loss_unit(measured, name), style.short(name, 40))
            ax.margins(x=0.02)
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        style.legend(canvas, max(panels, key=lambda ax: len(ax.get_lines())))

    rows = [_loss_row(name, values) for name, values in measured.losses.items() if values]
    table = Table(("stage", "steps", "first", "last", "lowest", "mean of the last tenth"), rows)
    alt = "; ".join(
        f"{name}: {first} at the first and {last} at the last of {n} steps" for name, n, first, last, *_ in rows
    )
    means = [f"each point of {name} is the mean of {n} steps" for name, n in stretch.items() if n > 1]
    caption = " ".join([_sentence_of_stages(measured, stages), *(f"{m.capitalize()}." for m in means)])
    caption = f"{caption} {conversion_conditions(measured)}"
    return style.figure("losses", "Training loss by stage", alt, caption, table, 40 + 140 * len(stages), plot)


def loss_unit(measured: Measurements, stage: str) -> str:
    """What a stage's loss is measured in."""
    settings = measured.stages.get(stage.removeprefix(_CONTROL), {})
    kinds = {s["name"]: s["kind"] for s in measured.record.get("stages") or ()}
    kind = settings.get("kind") or kinds.get(stage, stage)
    if kind == "anneal" and settings.get("learn") == "transfer":
        kind = "transfer"
    if kind == "preference":
        return "nats per pair"
    return _CHOSEN_UNITS.get(str(settings.get("loss")), _UNITS.get(kind, "nats per token"))


def _sentence_of_stages(measured: Measurements, stages: Sequence[str]) -> str:
    tokens = measured.record.get("tokens") or {}
    parts = [f"{name} on {tokens[name]:,} tokens" for name in stages if name in tokens]
    return f"{', '.join(parts)}." if parts else ""


def _loss_row(name: str, values: Sequence[float]) -> tuple[str, ...]:
    last = values[-max(1, len(values) // 10) :]
    shown = (values[0], values[-1], min(values), sum(last) / len(last))
    return (name, f"{len(values):,}", *(number(value) for value in shown))


def _means(values: Sequence[float], stretch: int) -> tuple[list[int], list[float]]:
    """The last step of every stretch, and the mean over it."""
    parts = [values[start : start + stretch] for start in range(0, len(values), stretch)]
    ends = [min(start + stretch, len(values)) for start in range(0, len(values), stretch)]
    return ends, [sum(part) / len(part) for part in parts]


def layer_errors(measured: Measurements) -> Figure | None:
    """Right after surgery and at the end of training, layer by layer."""
    names = {"surgery": "after surgery", "student": "after training"}
    colours = {"surgery": style.TEACHER, "student": style.STUDENT}
    found = {moment: values for moment, values in measured.layer_errors.items() if moment in names and any(
        value is not None for value in values
    )}  # fmt: skip
    if not found:
        return None
    count = max(len(values) for values in found.values())

    def plot(canvas: Canvas) -> None:
        ax = canvas.add_subplot()
        for moment, values in found.items():
            known = [(layer, value) for layer, value in enumerate(values) if value is not None]
            ax.plot(*zip(*known, strict=True), "o-", color=colours[moment], label=names[moment], linewidth=1)
        style.label(ax, "layer", "‖mine − teacher's‖ / ‖teacher's‖")
        style.layers(ax, count)
        ax.set_ylim(bottom=0)
        style.legend(canvas, ax)

    rows = [
        (str(layer), *(number(values[layer]) if layer < len(values) else "—" for values in found.values()))
        for layer in range(count)
    ]
    table = Table(("layer", *(names[moment] for moment in found)), rows)
    alt = "; ".join(
        f"{names[moment]}: " + ", ".join(f"layer {i} {number(v)}" for i, v in enumerate(values) if v is not None)
        for moment, values in found.items()
    )
    caption = (
        "Relative error of the attention's output at the teacher's own input of that layer, on held-out text; "
        f"layers that keep softmax have none. {conversion_conditions(measured)}"
    )
    return style.figure(
        "layer-errors", "Distance from the teacher's attention by layer", alt, caption, table, 255, plot
    )
