"""What a report is made from: the files that a conversion and its evaluation left in the student's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linearize.convert.card import is_hub_id
from linearize.convert.errors import ConversionError
from linearize.convert.export import RECORD
from linearize.distill.evaluate.suite import FILE, Evaluation, load_evaluation


@dataclass(frozen=True)
class Measurements:
    """All that is known of a student.

    Attributes:
        record: the conversion's summary, as `render_card` takes it.
        stages: the recipe's settings of every stage, by label.
        losses: stage -> training loss of every step; the control's stages begin with `control_`.
        layer_errors: moment ("surgery", "student") -> relative error of every layer's attention, None where the layer
            kept its own.
        family: the teacher's model type; None where the folder has no configuration.
        evaluation: None when `linearize eval` has not run.
    """

    record: dict[str, Any]
    stages: dict[str, dict[str, Any]]
    losses: dict[str, list[float]]
    layer_errors: dict[str, list[float | None]]
    family: str | None
    evaluation: Evaluation | None

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The plan, one entry per layer."""
        return list(self.record.get("plan") or [])


def read_measurements(folder: Path) -> Measurements:
    """Read `linearize.json` and, where there is one, `evaluation.json`.

    Raises:
        ConversionError: the folder is no exported student, or a file is damaged.
    """
    if not (folder / RECORD).is_file():
        raise ConversionError(f"{folder} is not an exported student: it has no {RECORD}")
    try:
        saved = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        recipe = saved.get("recipe") or {}
        record = {"command": saved.get("command"), **(saved.get("summary") or {})}
        if name := saved.get("teacher"):  # as the conversion found it: a Hub id, or the name of a folder
            record |= {"teacher": name, "base_model": name if is_hub_id(name) else None}
        elif name := recipe.get("teacher"):
            record["teacher"] = name
        config = _config(folder)
        record.setdefault("plan", config.get("layers"))
        stages = {stage.get("name") or stage["kind"]: stage for stage in recipe.get("stages") or ()}
        losses, errors = saved.get("losses") or {}, saved.get("layer_errors") or {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConversionError(f"{folder} is not an exported student: damaged JSON ({reason})") from None
    evaluation = load_evaluation(folder) if (folder / FILE).is_file() else None
    return Measurements(record, stages, losses, errors, config.get("base_model_type"), evaluation)


def _config(folder: Path) -> dict[str, Any]:
    """What the configuration says of the conversion."""
    file = folder / "config.json"
    return json.loads(file.read_text(encoding="utf-8"))["linearize"] if file.is_file() else {}


def conversion_conditions(measured: Measurements) -> str:
    """Text, seed, device and precision of the conversion, as a sentence."""
    record = measured.record
    seed = None if record.get("seed") is None else f"seed {record['seed']}"
    parts = [record.get("data"), seed, record.get("device"), record.get("dtype")]
    return _sentence([str(part) for part in parts if part is not None])


def evaluation_conditions(evaluation: Evaluation, *what: str, text: bool = True) -> str:
    """What was measured and on what text, then seed, device, precision and threads, as a sentence."""
    c = evaluation.conditions
    where = [f"seed {c.settings.seed}", c.device, c.dtype, f"{c.threads} thread{'s' if c.threads > 1 else ''}"]
    return _sentence([*what, *([c.data] if text else []), *where, *([c.date] if c.date else [])])


def _sentence(parts: list[str]) -> str:
    text = ", ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""
