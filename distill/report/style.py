"""How figures are drawn: one look for all, as SVG whose colours are CSS variables.

A figure is 330 units wide, so that its letters can be read on a phone; a page may show it larger. The same drawing
serves light and dark pages: matplotlib draws with stand-in colours, each of which becomes a variable. Nothing in a
drawing depends on the clock, on chance or on the machine's fonts.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from linearize.convert.card_sections import Figure, Table

INK, MUTED, GRID, PAPER = "#010101", "#010102", "#010103", "#010104"
STUDENT, TEACHER, CONTROL = "#010105", "#010106", "#010107"
MIXERS = ("#010108", "#010109", "#01010a", "#01010b", "#01010c", "#01010d")
"""Stand-ins for the colours of mixers, in the order of their first layer."""

THEMES: dict[str, dict[str, str]] = {
    "light": {
        "ink": "#1c2530", "muted": "#566273", "grid": "#e4e8ed", "paper": "#ffffff", "student": "#0a66c2",
        "teacher": "#7a8594", "control": "#c2571a", "mixer-1": "#3b82c4", "mixer-2": "#2f9e83", "mixer-3": "#c9822b",
        "mixer-4": "#9a6cc3", "mixer-5": "#c75d7b", "mixer-6": "#6f8f2f",
    },
    "dark": {
        "ink": "#e6eaf0", "muted": "#9ba7b6", "grid": "#2b333e", "paper": "#161b22", "student": "#6db3ff",
        "teacher": "#8995a5", "control": "#f29b62", "mixer-1": "#4f93d2", "mixer-2": "#43b598", "mixer-3": "#dc9a48",
        "mixer-4": "#b08ad6", "mixer-5": "#dc7b96", "mixer-6": "#8fae4d",
    },
}  # fmt: skip
"""Variable -> colour, on a light and on a dark page."""

_STAND_INS = dict(zip((INK, MUTED, GRID, PAPER, STUDENT, TEACHER, CONTROL, *MIXERS), THEMES["light"], strict=True))
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 11, "axes.titlesize": 11, "axes.labelsize": 11,
    "xtick.labelsize": 10.3, "ytick.labelsize": 10.3, "legend.fontsize": 10.3, "axes.titlelocation": "left",
    "axes.titlecolor": INK, "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": GRID, "xtick.color": GRID,
    "ytick.color": GRID, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED, "grid.color": GRID,
    "grid.linewidth": 0.8, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "lines.linewidth": 1.8, "lines.markersize": 4.5, "legend.frameon": False,
    "legend.handlelength": 1.8, "figure.facecolor": PAPER, "savefig.facecolor": "none", "axes.facecolor": "none",
    "svg.hashsalt": "linearize",
}  # fmt: skip
_WIDTH = 330
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def figure(
    key: str, title: str, alt: str, caption: str, numbers: Table, height: float, plot: Callable[[Canvas], None]
) -> Figure:
    """A drawing with its words; see `Figure` and `render`."""
    alt = f"{title}. {alt}."
    return Figure(key, title, alt, caption, render(key, alt, height, plot), numbers)


def render(key: str, alt: str, height: float, plot: Callable[[Canvas], None]) -> str:
    """An `<svg>` element.

    Args:
        key: goes before every id, so that several drawings can share a page.
        alt: its text for those who cannot see it.
        height: in units; the width is 330.
        plot: draws on the canvas that it is given.
    """
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_SETTINGS}):
        canvas = Canvas(figsize=(_WIDTH / 72, height / 72), layout="constrained")
        plot(canvas)
        written = io.StringIO()
        canvas.savefig(written, format="svg", metadata=_NO_METADATA, transparent=True)
    return _tidy(written.getvalue(), key, alt)


def _tidy(text: str, key: str, alt: str) -> str:
    """The bare element: own ids, variables for colours, fonts and size left to the page."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == "id":
                element.set(name, f"{key}-{value}")
            elif name == f"{{{_XLINK}}}href":
                element.set(name, f"#{key}-{value.removeprefix('#')}")
            elif name == "clip-path":
                element.set(name, value.replace("url(#", f"url(#{key}-"))
            elif name == "style":
                element.set(name, _style(value))
    for name in ("width", "height"):
        del root.attrib[name]
    root.attrib.update({"class": "plot", "role": "img", "aria-label": alt})
    return ElementTree.tostring(root, encoding="unicode")


def _style(style: str) -> str:
    style = re.sub(r"font-family: [^;]*;? ?", "", style)
    return re.sub(r"#0101[0-9a-f]{2}", lambda found: f"var(--{_STAND_INS[found[0]]})", style)


def variables(theme: str) -> str:
    """CSS declarations of a theme's colours."""
    return "".join(f"--{name}:{colour};" for name, colour in THEMES[theme].items())


def standalone(svg: str) -> str:
    """A file of its own, with a paper of its own, in the colours that its reader prefers."""
    style = (
        f"<style>:root{{{variables('light')}}}@media(prefers-color-scheme:dark){{:root{{{variables('dark')}}}}}"
        f"*{{stroke-linejoin:round}}text{{font-family:{_FONT}}}</style>"
        '<rect width="100%" height="100%" style="fill:var(--paper)"/>'
    )
    opening, rest = svg.split(">", 1)
    return f'{opening} width="660">{style}{rest}\n'


# ---------------------------------------------------------------------- what figures share


def label(ax: Axes, x: str, y: str, title: str = "") -> None:
    """Names and units of the axes; a light grid behind the values."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.set_title(title)
    ax.grid(axis="y")
    ax.tick_params(length=3)


def short(text: str, most: int) -> str:
    """At most so many characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def lengths(ax: Axes, values: Sequence[int]) -> None:
    """A logarithmic x axis with a tick at every one of `values`, or at as many of them as fit."""
    shown = sorted(set(values))
    while len(shown) > 6:
        shown = shown[::-2][::-1]
    ax.set_xscale("log", base=2)
    ax.set_xticks(shown, [f"{value:,}" for value in shown])
    ax.xaxis.set_minor_locator(NullLocator())


def layers(ax: Axes, count: int) -> None:
    """An x axis of `count` layers."""
    ax.set_xlim(-0.6, count - 0.4)
    ax.xaxis.set_major_locator(FixedLocator(range(count)) if count <= 12 else MaxNLocator(8, integer=True))


def percents(ax: Axes) -> None:
    """A y axis of shares, written as percentages."""
    ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share * 100:g} %"))


def wide_range(ax: Axes, values: Sequence[float]) -> None:
    """A y axis from zero, or a logarithmic one where the smallest of `values` would not be seen beside the largest."""
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    if min(values, default=0) > 0 and max(values) > 6 * min(values):
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_locator(LogLocator(base=2, numticks=7))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.set_ylim(bottom=0)


def legend(canvas: Canvas, ax: Axes, columns: int = 3) -> None:
    """Above the axes, so that it hides nothing."""
    found = sorted(
        zip(*ax.get_legend_handles_labels(), strict=True), key=lambda pair: not isinstance(pair[0], BarContainer)
    )
    legend_of(canvas, [handle for handle, _ in found], [name for _, name in found], columns)


def legend_of(canvas: Canvas, handles: Sequence[Any], names: Sequence[str], columns: int = 3) -> None:
    """A legend above the axes of handles and names."""
    canvas.legend(handles, names, loc="outside upper left", ncols=columns, columnspacing=1.2, borderaxespad=0.2)
