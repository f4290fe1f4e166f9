"""`linearize report DIR`: the report and the card, made again from what was measured."""

from __future__ import annotations

import json

from linearize.recipes.commands.app import Directory, JsonFlag, app


@app.command()
def report(directory: Directory, as_json: JsonFlag = False) -> None:
    """Write report.html, figures and README.md from the measurements saved in DIR; nothing is measured."""
    from linearize.convert.card_sections import FIGURES
    from linearize.distill.report import write_report

    page = write_report(directory)
    figures = sorted(str(file) for file in (directory / FIGURES).glob("*.svg"))
    if as_json:
        print(json.dumps({"report": str(page), "card": str(directory / "README.md"), "figures": figures}))
    else:
        print(f"{page} ({page.stat().st_size / 1024:.0f} KiB, {len(figures)} figures)")
