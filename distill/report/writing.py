"""Writes a student's report and card from the measurements saved beside it, and from nothing else.

Equal measurements give equal bytes: no clock, no chance, nothing of the machine goes in.
"""

from __future__ import annotations

import os
from pathlib import Path

from linearize.convert.card import render_card
from linearize.convert.card_sections import FIGURES, REPORT
from linearize.distill.report import style
from linearize.distill.report.limits import measured_limits
from linearize.distill.report.measurements import read_measurements
from linearize.distill.report.page import render_page
from linearize.distill.report.sections import sections

CARD = "README.md"


def write_report(directory: str | Path) -> Path:
    """Make `report.html`, `figures/*.svg` and `README.md` anew in a student's folder; returns the first.

    Args:
        directory: an exported student; `linearize.json` and, where it has been measured, `evaluation.json` are read.

    Raises:
        ConversionError: the folder is no exported student, or a file in it is damaged.
    """
    folder = Path(directory)
    measured = read_measurements(folder)
    parts, limits = sections(measured), measured_limits(measured)
    drawings = {f"{figure.key}.svg": style.standalone(figure.svg) for part in parts for figure in part.figures}
    (folder / FIGURES).mkdir(exist_ok=True)
    for old in (folder / FIGURES).glob("*.svg"):
        if old.name not in drawings:
            old.unlink()
    for name, drawing in drawings.items():
        _write(folder / FIGURES / name, drawing)
    _write(folder / CARD, render_card(measured.record, parts, limits))
    return _write(folder / REPORT, render_page(measured.record, parts, limits))


def _write(file: Path, text: str) -> Path:
    """Whole or not at all."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8", newline="\n")
    os.replace(partial, file)
    return file
