"""The model card of an exported student: every number in it comes from the record of its conversion."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from linearize.convert.card_sections import FIGURES, Section, Table
from linearize.convert.plan import KEEP
from linearize.convert.written import bracketed, cell, fenced, number, percent, size

Record = Mapping[str, Any]

PLACEHOLDER = "path/to/this/model"
"""Stands in a card for the name to load, until `push` knows it."""

_TEMPLATE = "card.md.jinja"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def render_card(record: Record, sections: Sequence[Section] = (), limits: Sequence[str] = ()) -> str:
    """The README.md of a student.

    Args:
        record: the summary of a conversion, as `linearize.json` holds it; the card leaves out what it lacks.
        sections: figures and tables beyond the record; the figures' files lie in `FIGURES`.
        limits: sentences that these measurements add to the known limits.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for written in (number, percent, size, cell, fenced, bracketed, markdown_table):
        environment.filters[written.__name__] = written
    view = card_view(record)
    return environment.get_template(_TEMPLATE).render(
        **{**view, "limits": [*view["limits"], *limits]},
        sections={section.key: section for section in sections},
        missing=_missing(sections),
        folder=FIGURES,
    )


def markdown_table(table: Table) -> str:
    """The lines of a table without its caption."""
    rule = ["---" if i < table.labels else "---:" for i in range(len(table.columns))]
    rows = [[cell(value) for value in row] for row in (table.columns, *table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def _missing(sections: Sequence[Section]) -> dict[str, list[str]]:
    """Command -> titles of the figures that it would make."""
    found: dict[str, list[str]] = {}
    for section in sections:
        for absent in section.missing:
            found.setdefault(absent.command, []).append(absent.title)
    return found


def card_view(record: Record) -> dict[str, Any]:
    """Everything of a record that a reader sees; what is absent is None or empty."""
    sample = {key: str(text) for key, text in _part(record, "sample").items()}
    return {
        "front_matter": _front_matter(record),
        "title": _title(record),
        "lead": _lead(record),
        "untrained": is_untrained(record),
        "placeholder": PLACEHOLDER,
        "prompt": json.dumps(sample.get("prompt") or "The"),
        "command": record.get("command"),
        "results": _results(record),
        "measured_on": _measured_on(record),
        "memory": _memory(record),
        "groups": _layer_groups(_plan(record)),
        "stages": _stages(record),
        "parameters": _part(record, "parameters"),
        "seconds": record.get("seconds"),
        "gate": _gate(record),
        "origin": _origin(record),
        "sample": {"prompt": None, "teacher": None, "student": None, **sample},
        "limits": _limits(record),
    }


def _part(record: Record, name: str) -> dict[str, Any]:
    """A nested part of the record without its empty entries."""
    return {key: value for key, value in (record.get(name) or {}).items() if value is not None}


def _plan(record: Record) -> list[dict[str, Any]]:
    return list(record.get("plan") or [])


def _mixers(record: Record) -> list[str]:
    """The mixers that replace attention, most used first."""
    used = [layer["mixer"] for layer in _plan(record) if layer["mixer"] != KEEP]
    named = [record["to"]] if record.get("to") else []
    return sorted(set(used), key=lambda name: (-used.count(name), name)) or named


# ---------------------------------------------------------------------- teacher and front matter


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a Hub id, user/name."""
    return _HUB_ID.fullmatch(name) is not None


def teacher_id(record: Record) -> str | None:
    """The Hub id of the teacher, or None if it is a local folder or a bundled one.

    A record that has `base_model` says it itself; otherwise a name is looked for among this machine's folders.
    """
    if "base_model" in record:
        return record["base_model"]
    teacher = str(record.get("teacher") or "")
    return teacher if is_hub_id(teacher) and not Path(teacher).is_dir() else None


def _teacher_name(record: Record) -> str:
    """The teacher as a reader should see it: of a local path only the folder's name."""
    teacher = str(record.get("teacher") or "")
    if teacher_id(record) or not re.search(r"[/\\]", teacher):
        return teacher
    return re.split(r"[/\\]", teacher.rstrip("/\\"))[-1]


def _front_matter(record: Record) -> str:
    data: dict[str, Any] = {}
    if base := teacher_id(record):
        data |= {"base_model": base, "base_model_relation": "finetune"}
    data |= _license(record)
    data |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    data["tags"] = ["linearize", "linear-attention", *_mixers(record)]
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True).strip()


def _license(record: Record) -> dict[str, str]:
    """The Hub knows licences by short identifiers; another name goes under `other`."""
    if "license" not in record:
        return {}
    name = str(record["license"] or "").strip().lower()
    if _LICENSE_ID.fullmatch(name):
        return {"license": name}
    slug = re.sub(r"[^a-z0-9.]+", "-", name).strip("-")
    return {"license": "other", **({"license_name": slug} if slug else {})}


# ---------------------------------------------------------------------- what it is


def _title(record: Record) -> str:
    """A heading such as "Llama-3.2-1B with rodimus in place of softmax attention"."""
    name = _teacher_name(record).split("/")[-1] or "A Transformer"
    return f"{name} with {', '.join(_mixers(record)) or 'other mixers'} in place of softmax attention"


def _lead(record: Record) -> str:
    """The first paragraph."""
    name, plan = _teacher_name(record), _plan(record)
    kept = [index for index, layer in enumerate(plan) if layer["mixer"] == KEEP]
    teacher = f"`{name}`" if name else "A pretrained softmax Transformer"
    if link := teacher_id(record):
        teacher = f"[{link}](https://huggingface.co/{link})"
    mixers = ", ".join(f"`{mixer}`" for mixer in _mixers(record)) or "other mixers"
    text = f"{teacher}, converted by `linearize`: {mixers} in place of softmax attention"
    if plan:
        text += f" in {len(plan) - len(kept)} of {len(plan)} layers"
    if kept:
        text += f". Layers that keep the teacher's own attention: {', '.join(map(str, kept))}"
    return text + "."


def _origin(record: Record) -> list[tuple[str, str]]:
    """Rows on what is needed to make it again."""
    rows = {
        "teacher": _teacher_name(record),
        "teacher's revision": record.get("revision"),
        "licence": record.get("license"),
        "data": record.get("data"),
        "seed": record.get("seed"),
        "device": record.get("device"),
        "dtype": record.get("dtype"),
        "versions": ", ".join(f"{name} {version}" for name, version in _part(record, "versions").items()),
    }
    return [(name, str(value)) for name, value in rows.items() if value not in (None, "")]


def _measured_on(record: Record) -> str:
    """The held-out text, as the end of a sentence."""
    tokens, context, data = (record.get(key) for key in ("heldout_tokens", "context", "data"))
    parts = [f"{number(tokens)} tokens of held-out text" if tokens else "held-out text"]
    parts += [f"of {data}"] if data else []
    parts += [f"at a context of {number(context)} tokens"] if context else []
    return ", ".join(parts) if tokens or context or data else ""


# ---------------------------------------------------------------------- tables


def is_untrained(record: Record) -> bool | None:
    """Whether the student is surgery alone; None if the record does not say."""
    tokens = _part(record, "tokens")
    perplexity = _part(record, "perplexity")
    if any(tokens.values()) or "transfer" in perplexity:
        return False
    return True if tokens or "surgery" in perplexity else None


def _measured(record: Record) -> dict[str, float]:
    """Perplexity after each step that was measured, in order; the last one is the checkpoint's own."""
    perplexity = _part(record, "perplexity")
    return {step: perplexity[step] for step in ("surgery", "transfer", "student") if step in perplexity}


def _results(record: Record) -> list[tuple[str, Any, Any, Any]]:
    """Rows of name, perplexity, KL and top-1 agreement."""
    rows: list[tuple[str, Any, Any, Any]] = []
    if (teacher := _part(record, "perplexity").get("teacher")) is not None:
        rows.append(("teacher", teacher, None, None))
    steps: list[tuple[str, Any, Any, Any]]
    steps = [(f"after {step}", value, None, None) for step, value in _measured(record).items()]
    if steps or record.get("kl") is not None:
        value = steps.pop()[1] if steps else None
        if scored := [stage for stage in record.get("stages") or () if stage.get("perplexity") is not None]:
            after = [(f"after {s['name']}", s["perplexity"], s.get("kl"), s.get("top1_agreement")) for s in scored[:-1]]
            steps = [step for step in steps if step[0] == "after surgery"] + after
        name = "**this student**"
        if is_untrained(record):
            name, steps = f"{name} (surgery only, untrained)", []
        rows += [*steps, (name, value, record.get("kl"), record.get("top1_agreement"))]
    if control := _part(record, "control"):
        name = f"control: {control.get('to', 'the window')} alone, same training"
        rows.append((name, control.get("perplexity"), control.get("kl"), control.get("top1_agreement")))
    return rows


def _memory(record: Record) -> list[tuple[int, int | None, int | None, float | None]]:
    """Rows of context, bytes of state, bytes of the teacher's KV cache, and their ratio."""
    state, cache = _part(record, "state_bytes"), _part(record, "kv_bytes")
    rows = []
    for context in sorted({*state, *cache}, key=int):
        mine, theirs = state.get(context), cache.get(context)
        rows.append((int(context), mine, theirs, theirs / mine if mine and theirs else None))
    return rows


def _stages(record: Record) -> list[tuple[str, Any, Any]]:
    """Rows of stage, training tokens and seconds."""
    tokens, seconds = _part(record, "tokens"), _part(record, "stage_seconds")
    return [(stage, tokens.get(stage), seconds.get(stage)) for stage in dict.fromkeys([*tokens, *seconds])]


def _layer_groups(plan: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Rows of layers, mixer and options; neighbours alike share a row."""
    rows = []
    for _, members in groupby(enumerate(plan), key=lambda item: item[1]):
        indices, layers = zip(*members, strict=True)
        span = str(indices[0]) if len(indices) == 1 else f"{indices[0]}–{indices[-1]}"
        options = ", ".join(f"{key}={value}" for key, value in (layers[0].get("options") or {}).items())
        kept = layers[0]["mixer"] == KEEP
        rows.append((span, "softmax, the teacher's own" if kept else f"`{layers[0]['mixer']}`", options))
    return rows


def _gate(record: Record) -> dict[str, Any]:
    """The parity gate: whether it passed, and rows of check, value, limit and outcome."""
    gate = _part(record, "gate")
    if not gate:
        return {}
    rows = []
    for check in gate.get("checks", ()):
        outcome = "passed" if check.get("passed") else f"**failed** {check.get('detail') or ''}"
        rows.append((check.get("name"), check.get("value"), check.get("limit"), outcome))
    return {"passed": gate.get("passed", False), "rows": rows}


# ---------------------------------------------------------------------- what was lost


def _limits(record: Record) -> list[str]:
    """Sentences for the section on known limits."""
    limits = []
    if is_untrained(record):
        limits.append("**Untrained**: the new tensors were never taught what the attention did.")
    limits += _losses(record) or ["Nothing was measured: how much of the teacher it kept is unknown."]
    if context := record.get("context"):
        limits.append(f"These numbers are for a context of {number(context)} tokens and say nothing of longer ones.")
    if kept := [layer for layer in _plan(record) if layer["mixer"] == KEEP]:
        layers = "the layer that keeps" if len(kept) == 1 else f"the {len(kept)} layers that keep"
        limits.append(f"The KV cache of {layers} softmax still grows with the context.")
    limits.append("Assisted decoding and continuous batching are refused: a state cannot take tokens back.")
    return limits


def _losses(record: Record) -> list[str]:
    """What the measurements say was lost."""
    losses = []
    mine = next(reversed(_measured(record).values()), None)
    theirs = _part(record, "perplexity").get("teacher")
    control = _part(record, "control").get("perplexity")
    if mine is not None and theirs:
        change = f"{'+' if mine >= theirs else ''}{percent(mine / theirs - 1)}"
        losses.append(f"Held-out perplexity is {number(mine)}, the teacher's {number(theirs)} ({change}).")
    if (same := record.get("top1_agreement")) is not None:
        losses.append(f"The likeliest next token is not the teacher's at {percent(1 - same)} of positions.")
    if (kl := record.get("kl")) is not None:
        losses.append(f"Predictions are {number(kl)} nats a token away from the teacher's (KL).")
    if mine is not None and control is not None:
        text = f"The control, a window alone, has perplexity {number(control)}, this student {number(mine)}"
        losses.append(f"{text}." if mine < control else f"**{text}**: the new mixers gain nothing here.")
    return losses
