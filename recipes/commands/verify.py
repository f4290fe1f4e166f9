"""`linearize verify DIR`: the parity gate."""

from __future__ import annotations

import json

import typer

from linearize.recipes.commands.app import EXIT_FAILED, Directory, JsonFlag, app


@app.command()
def verify(directory: Directory, as_json: JsonFlag = False) -> None:
    """Run the parity gate on an exported student."""
    from linearize.convert.verify import verify as run_gate

    report = run_gate(directory)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        for check in report.checks:
            mark = "ok    " if check.passed else "FAILED"
            print(f"{mark}  {check.name:58s} {check.value:10.2e}  limit {check.limit:.0e}  {check.detail}".rstrip())
        print("parity gate passed" if report.passed else "parity gate FAILED")
    if not report.passed:
        raise typer.Exit(EXIT_FAILED)
