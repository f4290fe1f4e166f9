"""Recipes side by side at equal tokens: final loss, KL, agreement, time, memory. Each runs in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from linearize.convert.errors import ConversionError
from linearize.distill.progress import say
from linearize.recipes.builtin import builtin_recipes
from linearize.recipes.schema import load_recipe


@dataclass(frozen=True)
class Row:
    """One recipe's outcome.

    Attributes:
        loss: held-out, nats per token; None where the recipe failed.
        tokens: of all its stages.
        seconds: training alone.
        peak_memory: bytes, the largest of its stages.
        problem: why it failed.
    """

    recipe: str
    to: str
    loss: float | None = None
    teacher_loss: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    peak_memory: int = 0
    problem: str | None = None


def compare_recipes(
    teacher: str, tokens: int, recipes: Sequence[str], out: Path, more: Sequence[str] = ()
) -> list[Row]:
    """Convert `teacher` by every recipe with `tokens` tokens; students, table and JSON go to `out`.

    A recipe that was compared before with the same command is not run again.

    Args:
        recipes: names or files; empty for all built-in ones.
        more: further arguments of `convert`, the same for all.
    """
    names = list(recipes) or list(builtin_recipes())
    loaded = {name: load_recipe(name) for name in names}  # what is wrong with one is said before any runs
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, recipe in loaded.items():
        say(f"--- {name}")
        rows.append(_run(name, recipe.to, teacher, tokens, out, more))
        (out / "comparison.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
        (out / "comparison.md").write_text(to_markdown(rows, teacher, tokens))
    return rows


def _run(name: str, to: str, teacher: str, tokens: int, out: Path, more: Sequence[str]) -> Row:
    label = Path(name).stem
    report = out / f"{label}.json"
    arguments = ["convert", teacher, "--recipe", name, "--tokens", str(tokens), "--no-control", *more]
    if report.is_file() and (before := json.loads(report.read_text()))["arguments"] == arguments:
        return _row(name, before["summary"])
    command = [
        sys.executable,
        "-m",
        "linearize.recipes.cli",
        *arguments,
        "--out",
        str(out / label),
        "--force",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stderr, file=sys.stderr, end="", flush=True)
    if not done.stdout.strip():
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Row(name, to, problem=lines[-1].removeprefix("error: "))
    summary = json.loads(done.stdout)
    report.write_text(json.dumps({"arguments": arguments, "summary": summary}))
    return _row(name, summary)


def _row(name: str, summary: dict[str, Any]) -> Row:
    stages = summary["stages"]
    return Row(
        recipe=name,
        to=summary["to"],
        loss=summary["loss"]["student"],
        teacher_loss=summary["loss"]["teacher"],
        kl=summary["kl"],
        top1_agreement=summary["top1_agreement"],
        tokens=sum(stage["tokens"] for stage in stages),
        seconds=sum(stage["seconds"] for stage in stages),
        peak_memory=max((stage["peak_memory"] for stage in stages), default=0),
        problem=None if summary["gate"]["passed"] else "the parity gate failed",
    )


def to_markdown(rows: Sequence[Row], teacher: str, tokens: int) -> str:
    """The table, best loss first, failures last."""
    lines = [
        f"{Path(teacher).name}, {tokens:,} tokens per recipe",
        "",
        "| recipe | mixer | tokens | loss | over the teacher | KL | same first choice | training, s | peak memory, MiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in sorted(rows, key=lambda row: float("inf") if row.loss is None else row.loss):
        if row.loss is None or row.teacher_loss is None:
            lines.append(f"| {row.recipe} | {row.to} | | failed: {row.problem} | | | | | |")
            continue
        note = f" ({row.problem})" if row.problem else ""
        lines.append(
            f"| {row.recipe}{note} | {row.to} | {row.tokens:,} | {row.loss:.4f} | {row.loss - row.teacher_loss:+.4f} | "
            f"{row.kl:.4f} | {row.top1_agreement:.1%} | {row.seconds:.0f} | {row.peak_memory / 2**20:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def check_rows(rows: Sequence[Row]) -> None:
    """Raise `ConversionError` if every recipe failed."""
    if rows and all(row.loss is None for row in rows):
        raise ConversionError(f"no recipe ran; the first said: {rows[0].problem}")
