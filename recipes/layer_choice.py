"""`linearize select`: rank a teacher's layers or heads by what replacing them costs, and write a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from linearize.convert.checkpoint import check_source, load_teacher, load_tokenizer
from linearize.convert.errors import ConversionError
from linearize.convert.plan import Plan, make_plan
from linearize.convert.surgery import build_student
from linearize.distill.device import choose_device
from linearize.distill.selection import Replacement, keep_costliest, rank_heads, rank_layers
from linearize.recipes.corpus import training_sample
from linearize.recipes.teachers import resolve_teacher


@dataclass(frozen=True)
class LayerChoice:
    """A ranking and the plan it gives.

    Attributes:
        ranking: costliest first.
        tokens: how many were read for it.
    """

    teacher: str
    ranking: list[Replacement]
    plan: Plan
    tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "teacher": self.teacher,
            "tokens": self.tokens,
            "ranking": [asdict(unit) for unit in self.ranking],
            "plan": self.plan.to_config(),
        }

    def to_text(self) -> str:
        lines = [f"{self.teacher}: KL in nats per token of replacing one at a time ({self.tokens:,} tokens)"]
        for unit in self.ranking:
            heads = "" if unit.heads is None else f" heads {', '.join(map(str, unit.heads))}"
            lines.append(f"  layer {unit.layer:3d}{heads:20s} {unit.kl:10.5f}")
        lines += ["plan", *(f"  {i:3d}  {layer}" for i, layer in enumerate(self.plan.layers))]
        return "\n".join(lines)


def choose_layers(
    teacher: str,
    to: str,
    keep: str = "25%",
    heads: bool = False,
    options: dict[str, Any] | None = None,
    data: str | None = None,
    tokens: int = 8_192,
    context: int = 512,
    seed: int = 0,
    device: str = "auto",
) -> LayerChoice:
    """Rank by marginal KL and keep the costliest share as softmax.

    Args:
        to: what the others become, as `convert --to` takes it.
        keep: a share such as "25%", or a number of layers (groups of heads, with `heads`).
        heads: rank groups of heads that share a kv head instead of whole layers.
        data: text to read; None for Python's standard library.

    Raises:
        ConversionError: bad input.
    """
    source = resolve_teacher(teacher)
    config = check_source(source.folder)
    plan = make_plan(config.num_hidden_layers, to, **(options or {}))
    longest = getattr(config, "max_position_embeddings", None) or context
    ids = training_sample(data, load_tokenizer(source.folder), tokens, context, longest, seed)
    where = choose_device(device)
    torch.manual_seed(seed)
    student = build_student(load_teacher(source.folder, device=where), plan, calibration=ids[: max(1, 4096 // context)])
    ranked = (rank_heads if heads else rank_layers)(student, ids)
    chosen = keep_costliest(plan, ranked, _share(keep, len(ranked)))
    costliest_first = sorted(ranked, key=lambda unit: unit.kl, reverse=True)
    return LayerChoice(source.label, costliest_first, chosen, ids.numel())


def _share(keep: str, units: int) -> float:
    text = keep.strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else int(text) / units
    except ValueError:
        raise ConversionError(f"--keep {keep!r} is not understood; give a share such as 25% or a number") from None
    if not 0 <= share <= 1:
        raise ConversionError(f"--keep {keep!r}: there are {units} to choose from")
    return share


def write_plan(plan: Plan, file: Path, force: bool = False) -> None:
    """Write `plan` as YAML for `convert --to FILE`; refuses to overwrite unless `force`."""
    if file.exists() and not force:
        raise ConversionError(f"--out {file} exists; choose another or overwrite it with --force")
    file.write_text(plan.to_yaml(), encoding="utf-8")
