"""The report as one HTML page that needs no network, no script and no other file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from linearize.convert.card import card_view
from linearize.convert.card_sections import Figure, Section, Table
from linearize.convert.written import number, percent, size
from linearize.distill.report import style

_TEMPLATE, _CSS = "page.html.jinja", "page.css"
_TALL = 300
"""A higher drawing stands beside two others."""


def render_page(record: Mapping[str, Any], sections: Sequence[Section], limits: Sequence[str] = ()) -> str:
    """HTML of the report; see `render_card` for the arguments.

    Text of the record is escaped; only the drawings are taken as they are.
    """
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["marked"] = marked
    view = card_view(record)
    colours = {theme: style.variables(theme) for theme in style.THEMES}
    return environment.get_template(_TEMPLATE).render(
        **{**view, "limits": [*view["limits"], *limits]},
        sections=sections,
        tables={section.key: [*_own_tables(section.key, view), *section.tables] for section in sections},
        tall={figure.key for section in sections for figure in section.figures if _height(figure) > _TALL},
        result_rows=[(marked(name), number(a), number(b), percent(c)) for name, a, b, c in view["results"]],
        gate_rows=[(n, number(v), number(limit), marked(o)) for n, v, limit, o in view["gate"].get("rows", ())],
        headlines=_headlines(record, view),
        colours=colours,
        css=(folder / _CSS).read_text(encoding="utf-8"),
    )


def _height(figure: Figure) -> float:
    found = re.search(r'viewBox="0 0 \S+ ([\d.]+)"', figure.svg)
    return float(found[1]) if found else 0.0


def _own_tables(key: str, view: Mapping[str, Any]) -> list[Table]:
    """What the card shows under headings of its own."""
    rows: list[tuple[str, ...]]
    if key == "layers" and view["groups"]:
        rows = [(span, marked(mixer), options or "—") for span, mixer, options in view["groups"]]
        return [Table(("layers", "attention", "options"), rows, labels=3)]
    if key == "memory" and view["memory"]:
        rows = [(number(n), size(mine), size(theirs), _times(ratio)) for n, mine, theirs, ratio in view["memory"]]
        caption = "For one sequence, computed from the shapes of the states and of the teacher's keys and values."
        return [Table(("context, tokens", "this student", "teacher", "smaller by"), rows, caption=caption)]
    if key == "training" and view["stages"]:
        rows = [(stage, number(tokens), number(seconds)) for stage, tokens, seconds in view["stages"]]
        counts = ", ".join(f"{number(count)} {name}" for name, count in view["parameters"].items())
        caption = f"Parameters: {counts}." if counts else ""
        if view["seconds"] is not None:
            caption += f" The whole conversion took {number(view['seconds'])} seconds."
        return [Table(("step", "tokens", "seconds"), rows, caption=caption.strip())]
    return []


def _times(ratio: float | None) -> str:
    return f"{ratio:.1f}×" if ratio else "—"


def marked(text: str) -> Markup:
    """The card's sentences as HTML: bold, code and links; everything else is escaped."""
    html = str(escape(text))
    html = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html)
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", html)
    return Markup(re.sub(r"\[([^\]]+)\]\((https://[^\s)]+)\)", r'<a href="\2">\1</a>', html))


def _headlines(record: Mapping[str, Any], view: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers that are read first: name, value, condition."""
    found = []
    perplexity = record.get("perplexity") or {}
    mine, theirs = perplexity.get("student"), perplexity.get("teacher")
    if mine is not None and theirs:
        found.append(("perplexity", number(mine), f"teacher {number(theirs)}, {mine / theirs:.3f}×"))
    if (kl := record.get("kl")) is not None:
        found.append(("KL to the teacher", number(kl), "nats per token"))
    if (same := record.get("top1_agreement")) is not None:
        found.append(("same first choice", percent(same), "of held-out tokens"))
    if view["memory"] and view["memory"][-1][3]:
        context, state, _, ratio = view["memory"][-1]
        found.append(("smaller memory", _times(ratio), f"{size(state)} at {number(context)} tokens"))
    if gate := view["gate"]:
        passed = sum(row[3] == "passed" for row in gate["rows"])
        found.append(
            ("parity gate", "passed" if gate["passed"] else "failed", f"{passed} of {len(gate['rows'])} checks")
        )
    return found
