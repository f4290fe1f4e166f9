"""Every mixer on one teacher, by the same conversion: what each loses and saves, in one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from linearize.convert.checkpoint import check_source
from linearize.convert.errors import ConversionError
from linearize.convert.mixers import MIXERS
from linearize.convert.plan import make_plan
from linearize.distill.evaluate.speed import measure_speed
from linearize.distill.progress import say
from linearize.recipes.summary import Summary
from linearize.recipes.surgery_report import measure_surgery
from linearize.recipes.teachers import resolve_teacher

SPEED_CONTEXT, SPEED_TOKENS = 1024, 32


@dataclass(frozen=True)
class MixerRow:
    """One mixer's conversion. Perplexities are ratios to the teacher's on held-out text.

    Attributes:
        attention_error: relative error of the attention's output right after surgery, see `SurgeryError.attention`.
        transfer: after the transfer stage; None where none ran.
        state_bytes: context in tokens -> bytes one sequence holds.
        decode: generated tokens per second, one sequence, after 1,024 tokens.
        problem: why there are no numbers, or which check failed.
    """

    mixer: str
    attention_error: float | None = None
    surgery: float | None = None
    transfer: float | None = None
    student: float | None = None
    kl: float | None = None
    state_bytes: dict[str, int] | None = None
    kv_bytes: dict[str, int] | None = None
    decode: float | None = None
    seconds: float | None = None
    device: str | None = None
    problem: str | None = None


def bench_mixers(
    teacher: str,
    out: Path,
    mixers: Sequence[str] = (),
    tokens: int = 200_000,
    data: str | None = None,
    force: bool = False,
    **settings: Any,
) -> list[MixerRow]:
    """Convert `teacher` with every mixer; students, `mixers.json` and `mixers.md` go to `out`.

    A mixer that was measured before with the same settings is not run again, and a conversion that was stopped goes on.

    Args:
        mixers: names or plans; empty for every registered mixer but `softmax`.
        tokens: training tokens of each conversion.
        force: start over, whatever is in `out`.
        settings: further fields of `Recipe`, the same for all.

    Raises:
        ConversionError: a mixer or the teacher does not exist. One that fails on the way has a row with its problem.
    """
    layers = check_source(resolve_teacher(teacher).folder).num_hidden_layers
    names = list(mixers) or [name for name in sorted(MIXERS) if name != "softmax"]
    for name in names:
        make_plan(layers, name)  # what is wrong with one is said before any runs
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        rows.append(_row(name, teacher, out, tokens, data, force, settings))
        (out / "mixers.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
        (out / "mixers.md").write_text(mixer_rows_table(rows) + "\n")
    return rows


def _row(
    name: str, teacher: str, out: Path, tokens: int, data: str | None, force: bool, settings: dict[str, Any]
) -> MixerRow:
    from linearize.recipes import convert

    asked = json.loads(json.dumps({"teacher": teacher, "to": name, "tokens": tokens, "data": data, **settings}))
    folder = out / name.replace(":", "_").replace("/", "_")
    record = folder.with_name(folder.name + ".json")
    if record.is_file() and not force and (before := json.loads(record.read_text()))["asked"] == asked:
        say(f"{name}: measured before")
        return MixerRow(**before["row"])
    say(f"--- {name}")
    try:
        found = resolve_teacher(teacher)
        plan = make_plan(check_source(found.folder).num_hidden_layers, name, **settings.get("options", {}))
        error = measure_surgery(found, plan, data, settings.get("seed", 0), settings.get("device", "auto"))
        replace = force or (folder.is_dir() and any(folder.iterdir()))
        summary = convert(
            teacher, name, folder, tokens, resume=not force, force=replace, data=data, control=False, **settings
        )
        row = _measured(name, error.attention, summary)
    except (ConversionError, ValueError, RuntimeError) as problem:
        return MixerRow(name, problem=" ".join(str(problem).split())[:300])
    record.write_text(json.dumps({"asked": asked, "row": asdict(row)}, indent=1))
    return row


def _measured(name: str, attention_error: float, summary: Summary) -> MixerRow:
    p = summary.perplexity
    student: Any = AutoModelForCausalLM.from_pretrained(summary.out, dtype="auto").eval()
    student.to(summary.device)
    score = measure_speed({name: student}, (SPEED_CONTEXT,), SPEED_TOKENS)
    del student
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    failed = [check["name"] for check in summary.gate["checks"] if not check["passed"]]
    return MixerRow(
        mixer=name,
        attention_error=attention_error,
        surgery=None if p.surgery is None else p.surgery / p.teacher,
        transfer=None if p.transfer is None else p.transfer / p.teacher,
        student=p.student / p.teacher,
        kl=summary.kl,
        state_bytes=summary.state_bytes,
        kv_bytes=summary.kv_bytes,
        decode=score.points[0].decode,
        seconds=summary.seconds,
        device=summary.device,
        problem=f"the parity gate failed: {', '.join(failed)}" if failed else None,
    )


def mixer_rows_table(rows: Sequence[MixerRow]) -> str:
    """Markdown: the best student first, failures last."""
    measured = sorted((row for row in rows if row.student is not None), key=lambda row: row.student or 0.0)
    contexts = list((measured[0].state_bytes or {}) if measured else [])
    heads = ["mixer", "attention off by", "after surgery", "after transfer", "student", "KL"]
    heads += [*(f"state at {int(c):,}, bytes" for c in contexts), "tokens/s", "seconds"]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in measured:
        cells = [row.mixer, _percent(row.attention_error), *map(_ratio, (row.surgery, row.transfer, row.student))]
        cells += [f"{row.kl:.4f}", *(f"{(row.state_bytes or {})[c]:,}" for c in contexts)]
        cells += [f"{row.decode:,.0f}", f"{row.seconds:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Ratios are of held-out perplexity to the teacher's, before any training, after the transfer stage, and",
    ]
    lines += ["at the end; tokens/s are of one sequence after 1,024 tokens."]
    lines += [f"- {row.mixer}: {row.problem}" for row in rows if row.problem]
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} x"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
