"""`linearize list`: the mixers and their options."""

from __future__ import annotations

import json

from linearize.recipes.commands.app import JsonFlag, app


@app.command("list")
def list_mixers(as_json: JsonFlag = False) -> None:
    """List the mixers and their options."""
    from linearize.recipes.inspection import mixer_table

    table = mixer_table()
    if as_json:
        print(json.dumps(table))
        return
    for name, entry in table.items():
        print(f"{name:12s} {entry['about']}")
        for option, about in entry["options"].items():
            print(f"    {option:14s} {about['default']!s:>8}  {about['description']}")
