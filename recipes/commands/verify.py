"""`linearize verify DIR`: the parity gate."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from linearize.recipes.commands.app import EXIT_FAILED, Directory, JsonFlag, app


@app.command()
def verify(
    directory: Directory,
    stream: Annotated[bool, typer.Option("--stream", help="only the checks that hold one block in memory")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run the parity gate on an exported student."""
    from linearize.convert.verify import verify as run_gate
    from linearize.convert.verify import verify_streamed

    report = verify_streamed(directory) if stream else run_gate(directory)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        for check in report.checks:
            mark = "ok    " if check.passed else "FAILED"
            print(f"{mark}  {check.name:58s} {check.value:10.2e}  limit {check.limit:.0e}  {check.detail}".rstrip())
        print("parity gate passed" if report.passed else "parity gate FAILED")
    if not report.passed:
        raise typer.Exit(EXIT_FAILED)
