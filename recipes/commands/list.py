"""`linearize list`: the mixers, channel mixers and aliases, and their options."""

from __future__ import annotations

import json

from linearize.recipes.commands.app import JsonFlag, app


@app.command("list")
def list_mixers(as_json: JsonFlag = False) -> None:
    """List what --to and --ffn take, with their options."""
    from linearize.recipes.inspection import mixer_table

    table = mixer_table()
    if as_json:
        print(json.dumps(table))
        return
    kind = ""
    for name, entry in table.items():
        if entry["kind"] != kind:
            kind = entry["kind"]
            print(
                {"mixer": "mixers (--to)", "alias": "aliases (--to)", "channel mixer": "channel mixers (--ffn)"}[kind]
            )
        print(f"  {name:16s} {entry['about']}")
        for option, about in entry["options"].items():
            print(f"      {option:16s} {about['default']!s:>8}  {about['description']}")
