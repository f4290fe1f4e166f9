"""`linearize push DIR USER/NAME`: publish a student."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from linearize.recipes.commands.app import Directory, JsonFlag, app


@app.command()
def push(
    directory: Directory,
    repo_id: Annotated[str, typer.Argument(help="USER/NAME on the Hub")],
    private: Annotated[bool, typer.Option("--private", help="make the repository private")] = False,
    revision: Annotated[str | None, typer.Option(help="branch to upload to")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list what would be uploaded")] = False,
    force: Annotated[bool, typer.Option("--force", help="upload even if the parity gate fails")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Upload an exported student that passes its gate, with its card."""
    from dataclasses import asdict

    from linearize.convert.hub import push as upload

    result = upload(directory, repo_id, private=private, revision=revision, dry_run=dry_run, force=force)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    for name, size in result.files:
        print(f"{size:>14,}  {name}")
    print("nothing was uploaded (dry run)" if dry_run else f"uploaded to {result.url}")
