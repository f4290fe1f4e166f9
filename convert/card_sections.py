"""What a report adds to a card: figures, tables, and what was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIGURES = "figures"
"""Folder of the figures, inside the student's."""


REPORT = "report.html"


@dataclass(frozen=True)
class Table:
    """Cells as they are written.

    Attributes:
        labels: how many columns at the left are words; the others are numbers and stand to the right.
        caption: under which conditions the numbers hold.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """One picture.

    Attributes:
        key: name of its file in `FIGURES`, without the ending; lower case letters and hyphens.
        alt: what is to be seen, with its numbers, for those who cannot see it.
        caption: under which conditions the numbers hold.
        svg: the drawing. Its colours are CSS variables, so that it follows the page into the dark.
        numbers: what was drawn.
    """

    key: str
    title: str
    alt: str
    caption: str
    svg: str
    numbers: Table


@dataclass(frozen=True)
class Missing:
    """A figure that no measurement was saved for, and the command that makes it."""

    title: str
    command: str


@dataclass(frozen=True)
class Section:
    """Figures and tables on one question.

    Attributes:
        key: where a card already has a heading for it, that heading's name in lower case: layers, training, memory.
        text: one or two sentences on how to read it.
    """

    key: str
    title: str
    text: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    missing: Sequence[Missing] = ()

    @property
    def filled(self) -> bool:
        """Whether anything was measured."""
        return bool(self.figures or self.tables)
