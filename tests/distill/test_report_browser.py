"""The report in a real browser: both widths, both themes; nothing overflows, nothing is fetched, nothing complains."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linearize.distill.report import write_report
from tests.distill.test_report import HOSTILE, KEYS, saved_evaluation, saved_record, student

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'linearize[browser]'")

BROWSER = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
SMALLEST_LETTERS = 9.0
"""Pixels of the figures' letters on a phone."""

VIEWS = [(width, theme) for width in (360, 1280) for theme in ("light", "dark")]

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as api:
        found = api.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


def wide_record() -> dict[str, Any]:
    """A record whose words and tables are as long as they get."""
    record = saved_record()
    summary = record["summary"]
    summary["plan"] = [{"mixer": f"mixer-{i % 9}" + "-long" * (i % 9), "options": {"window": 2**i}} for i in range(80)]
    summary["command"] = "convert " + "/a/very/long/path" * 20
    summary["sample"] = {"prompt": "x" * 500, "teacher": HOSTILE * 9, "student": "y z" * 400}
    summary["device"] = "a-device-" * 20
    record["losses"] |= {f"stage-{i}": [1.0 / (n + 1) for n in range(1000)] for i in range(3)}
    record["layer_errors"] = {"surgery": [i / 80 for i in range(80)]}
    return record


@pytest.fixture(scope="module", params=["usual", "wide", "bare"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = {"usual": saved_record(), "wide": wide_record(), "bare": {"summary": None}}
    evaluation = None if request.param == "bare" else saved_evaluation()
    return write_report(student(tmp_path_factory.mktemp("pages") / request.param, records[request.param], evaluation))


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def page(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Any]:
    """The page, with what it asked for and what it said in `asked` and `said`."""
    width, theme = request.param
    opened = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=theme)
    opened.asked, opened.said = [], []
    opened.on("request", lambda asked: opened.asked.append(asked.url))
    opened.on("console", lambda message: opened.said.append(message.text))
    opened.on("pageerror", lambda error: opened.said.append(str(error)))
    opened.goto(report.as_uri())
    yield opened
    opened.close()


def test_it_opens_whole(page: Any, report: Path) -> None:
    assert page.said == [] and page.asked == [report.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    for details in page.query_selector_all("summary"):
        details.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"], "with numbers shown"
    assert page.said == [] and len(page.asked) == 1
    spilled = page.evaluate(
        """[...document.querySelectorAll('body *')].filter(e => !e.closest('svg') && !e.parentElement.closest('.scroll, pre')
        && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert spilled == []


def test_figures_can_be_read(page: Any, report: Path) -> None:
    """Every panel of every figure has two axes with words, inside the picture, in letters of a readable size."""
    figures = page.query_selector_all("figure")
    if report.parent.name != "bare":
        assert {figure.get_attribute("id") for figure in figures} == {f"figure-{key}" for key in KEYS}
    for figure in figures:
        shown = figure.evaluate(
            """f => {const svg = f.querySelector('svg'), box = svg.getBoundingClientRect();
            const scale = box.width / svg.viewBox.baseVal.width;
            return {box: [box.left, box.top, box.right, box.bottom], texts: [...svg.querySelectorAll('text')].map(t => {
            const r = t.getBoundingClientRect(), s = getComputedStyle(t), axis = t.closest('[id*="matplotlib.axis_"]');
            return {words: t.textContent.trim(), axis: axis && axis.id, box: [r.left, r.top, r.right, r.bottom],
            size: parseFloat(s.fontSize) * scale, colour: s.fill}})}}"""
        )
        axes: dict[str, list[str]] = {}
        left, top, right, bottom = shown["box"]
        for text in shown["texts"]:
            assert text["size"] >= SMALLEST_LETTERS, text
            x0, y0, x1, y1 = text["box"]
            assert x1 > x0 and left - 1 <= x0 and top - 1 <= y0 and x1 <= right + 1 and y1 <= bottom + 1, text
            axes.setdefault(text["axis"] or "none", []).append(text["words"])
        words = re.compile(r"[^\W\d]{3}")
        named = {axis for axis, texts in axes.items() if any(words.search(text) for text in texts)}
        sides = {int(axis.rsplit("_", 1)[1]) % 2 for axis in named if "axis_" in axis}  # x and y in turn
        assert sides == {0, 1}, f"{figure.get_attribute('id')} has axes without names: {axes}"


def test_it_is_light_or_dark_as_asked(page: Any) -> None:
    """Letters stand out from the paper, in pages and figures."""
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    pairs = page.evaluate(
        """[...document.querySelectorAll('h1, p, td, th, figcaption, figure text, code, pre, a, summary')].map(e => {
        let behind = e; while (getComputedStyle(behind).backgroundColor == 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
        const s = getComputedStyle(e);
        return [e.tagName == 'text' ? s.fill : s.color, getComputedStyle(behind).backgroundColor]})"""
    )
    assert pairs
    for colours in {tuple(pair) for pair in pairs}:
        ink, paper = (_luminance(colour) for colour in colours)
        assert (paper < 0.1) if dark else (paper > 0.8), colours
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, f"too little contrast: {colours}"


def _luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)` (WCAG 2)."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_cards_pictures_open_by_themselves(browser: Any, tmp_path: Path) -> None:
    folder = student(tmp_path / "a", evaluation=saved_evaluation())
    write_report(folder)
    page = browser.new_page(viewport={"width": 360, "height": 800}, color_scheme="dark")
    sources = "".join(f'<img src="figures/{key}.svg">' for key in sorted(KEYS))
    (folder / "all.html").write_text(f"<!DOCTYPE html>{sources}")
    page.goto((folder / "all.html").as_uri())
    widths = page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth)")
    page.close()
    assert widths == [660] * len(KEYS)
