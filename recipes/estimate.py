"""`linearize estimate RECIPE`: what a conversion will train, hold, write and take, before anything runs.

Every stage is prepared and run for a step on the meta device, so operations and memory are counted, not guessed. Hours
are operations over a share of the GPU's rate; that share is an assumption.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from linearize.convert.checkpoint import check_source, checkpoint_tensors
from linearize.convert.errors import ConversionError
from linearize.convert.plan import Plan, make_plan
from linearize.convert.surgery import build_student, new_parameters
from linearize.distill.data import TokenBlocks
from linearize.distill.dry_run import META, Cost, forward_cost, step_cost
from linearize.distill.stages import Stage, Workbench
from linearize.recipes.defaults import stages_of
from linearize.recipes.pipeline import for_window
from linearize.recipes.schema import Recipe
from linearize.recipes.teachers import BUNDLED, resolve_teacher

UTILISATION = 0.4
"""Share of its peak rate that a GPU is assumed to reach in training."""
CPU_UTILISATION = 0.5
MEASURED_AT_ONCE = 4
"""Sequences per pass over held-out text."""


@dataclass(frozen=True)
class Machine:
    """Dense bfloat16 (float16 where there is none) operations per second, and memory in bytes, by the maker's sheet."""

    name: str
    rate: float
    memory: int


_GB = 10**9
GPUS = {
    "b200": Machine("NVIDIA B200", 2250e12, 180 * _GB),
    "h200": Machine("NVIDIA H200", 989e12, 141 * _GB),
    "h100": Machine("NVIDIA H100 SXM", 989e12, 80 * _GB),
    "a100": Machine("NVIDIA A100 80GB", 312e12, 80 * _GB),
    "a100-40": Machine("NVIDIA A100 40GB", 312e12, 40 * _GB),
    "l40s": Machine("NVIDIA L40S", 362e12, 48 * _GB),
    "l4": Machine("NVIDIA L4", 121e12, 24 * _GB),
    "t4": Machine("NVIDIA T4", 65e12, 16 * _GB),
    "rtx4090": Machine("NVIDIA RTX 4090", 165e12, 24 * _GB),
    "rtx3090": Machine("NVIDIA RTX 3090", 71e12, 24 * _GB),
}


@dataclass(frozen=True)
class StageEstimate:
    """One step of a conversion.

    Attributes:
        parameters: numbers that train.
        flops: operations of the whole stage.
        peak_bytes: largest memory of all tensors at once.
        problem: why a stage could not be estimated.
    """

    name: str
    tokens: int = 0
    steps: int = 0
    parameters: int = 0
    flops: float = 0.0
    peak_bytes: int = 0
    hours: float = 0.0
    problem: str | None = None


@dataclass(frozen=True)
class Estimate:
    """A whole conversion.

    Attributes:
        disk_bytes: the student and, while it runs, the states of its stages.
        machine: what the hours are for.
    """

    teacher: str
    to: str
    stages: list[StageEstimate]
    disk_bytes: int
    machine: str
    utilisation: float
    memory: int | None

    @property
    def peak_bytes(self) -> int:
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def hours(self) -> float:
        return sum(stage.hours for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        totals = {"peak_bytes": self.peak_bytes, "hours": self.hours, "flops": sum(s.flops for s in self.stages)}
        return {**asdict(self), **totals}

    def to_text(self) -> str:
        head = f"{'':20s}{'tokens':>14s}{'trains':>14s}{'FLOPs':>11s}{'memory':>12s}{'time':>10s}"
        lines = [f"{self.teacher} -> {self.to}", head]
        for s in self.stages:
            if s.problem is not None:
                lines.append(f"{s.name:20s}not estimated: {s.problem}")
                continue
            lines.append(
                f"{s.name:20s}{s.tokens:14,}{s.parameters:14,}{s.flops:11.2e}{_gib(s.peak_bytes):>12s}{_time(s.hours):>10s}"
            )
        fits = "" if self.memory is None else f" of {_gib(self.memory)}"
        if self.memory is not None and self.peak_bytes > self.memory:
            fits += ": DOES NOT FIT; smaller batches or contexts, or transfer with stream: true"
        lines += [
            f"memory {_gib(self.peak_bytes)}{fits}, disk {_gib(self.disk_bytes)}, {_time(self.hours)} on {self.machine}",
            f"hours assume {self.utilisation:.0%} of the machine's rate; memory is that of tensors in the plain-torch "
            "kernels, without the framework's own",
        ]
        return "\n".join(lines)


def estimate(recipe: Recipe, gpu: str | None = None) -> Estimate:
    """Count one step of every stage of `recipe` and multiply.

    Args:
        gpu: a key of `GPUS`, or "cpu" for this machine's processor; None for the recipe's device.

    Raises:
        ConversionError: the recipe, its teacher or the GPU is not known.
    """
    name = (gpu or ("h100" if recipe.device.startswith("cuda") or torch.cuda.is_available() else "cpu")).lower()
    if name != "cpu" and name not in GPUS:
        raise ConversionError(f"--gpu {gpu!r} is not known; there are cpu, {', '.join(GPUS)}")
    label, config = _configuration(recipe)
    dtype = _dtype(recipe, name)
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    ffn: dict[str, Any] = {"ffn": recipe.ffn, "ffn_options": recipe.ffn_options}
    plan = make_plan(config.num_hidden_layers, recipe.to, recipe.keep_softmax, **ffn, **recipe.options)
    machine = GPUS.get(name)
    rate = machine.rate * UTILISATION if machine else _measured_rate() * CPU_UTILISATION
    counted = _Counted(recipe, config, model, rate)
    stages = counted.conversion(plan)
    student_bytes = sum(t.nbytes for t in checkpoint_tensors(build_student(model, plan)).values())
    states = sum(3 * 4 * stage.parameters for stage in stages)
    return Estimate(
        teacher=label,
        to=recipe.to,
        stages=stages,
        disk_bytes=student_bytes + states,
        machine=machine.name if machine else "this processor",
        utilisation=UTILISATION if machine else CPU_UTILISATION,
        memory=machine.memory if machine else None,
    )


class _Counted:
    """The steps of one conversion, each run once without numbers."""

    def __init__(self, recipe: Recipe, config: Any, model: PreTrainedModel, rate: float) -> None:
        self.recipe, self.model, self.rate = recipe, model, rate
        self.longest = getattr(config, "max_position_embeddings", None) or recipe.context
        self.stages = stages_of(recipe)

    def conversion(self, plan: Plan) -> list[StageEstimate]:
        student = build_student(self.model, plan)
        found = self._trained(student, self.stages, "")
        measured = [self._measured(student, 1 + sum(stage.problem is None for stage in found))]
        if self.recipe.control and self.recipe.to not in ("swa", "softmax"):
            window = self.recipe.options.get("window") or 64
            control = build_student(
                self.model, make_plan(len(plan.layers), "swa", self.recipe.keep_softmax, window=window)
            )
            found += self._trained(control, [for_window(stage, window) for stage in self.stages], "control ")
        return found + measured

    def _trained(self, student: PreTrainedModel, stages: list[Stage], prefix: str) -> list[StageEstimate]:
        new = frozenset(new_parameters(student))
        found = [self._stage(stage, student, new, prefix) for stage in stages if stage.tokens]
        return [stage for stage in found if stage.parameters or stage.problem]  # a window alone may have nothing new

    def _stage(self, stage: Stage, student: PreTrainedModel, new: frozenset[str], prefix: str) -> StageEstimate:
        length = stage.context or self.recipe.context
        length = length if stage.beyond_teacher else min(length, self.longest)
        assert stage.batch_size is not None
        per_step = stage.batch_size * length
        steps = max(1, math.ceil(stage.tokens / per_step))
        blocks = TokenBlocks(torch.zeros(per_step, dtype=torch.long), length)
        bench = Workbench(student, self.model, new, blocks, steps, stage.batch_size, 0, Path())
        batch = torch.zeros(stage.batch_size, *stage.example_shape, length, dtype=torch.long, device=META)
        name = prefix + stage.label
        flops, peak, parameters = 0.0, 0, 0
        try:
            for part in stage.prepare(bench):
                if not part.groups:
                    continue
                cost = step_cost(part.objective, part.groups, batch)
                flops += cost.flops * max(1, math.ceil(stage.tokens * part.share / per_step))
                peak = max(peak, cost.peak_bytes)
                parameters = max(parameters, sum(p.numel() for g in part.groups for p in g["params"].values()))
        except (ConversionError, RuntimeError, OSError) as error:
            return StageEstimate(name, stage.tokens, problem=str(error).splitlines()[0])
        return StageEstimate(name, steps * per_step, steps, parameters, flops, peak, flops / self.rate / 3600)

    def _measured(self, student: PreTrainedModel, times: int) -> StageEstimate:
        """Student and teacher over the held-out text, as often as they are measured."""
        length = min(self.recipe.heldout_context or 1024, self.longest)
        batch = torch.zeros(MEASURED_AT_ONCE, length, dtype=torch.long, device=META)
        costs: list[Cost] = [forward_cost(model, batch) for model in (student, self.model)]
        passes = times * math.ceil(self.recipe.heldout_tokens / batch.numel())
        flops = float(passes * sum(cost.flops for cost in costs))
        peak = max(cost.peak_bytes for cost in costs)
        return StageEstimate(
            "measuring", times * self.recipe.heldout_tokens, passes, 0, flops, peak, flops / self.rate / 3600
        )


def _configuration(recipe: Recipe) -> tuple[str, Any]:
    """The teacher's label and configuration; of a Hub model nothing but the configuration is fetched."""
    if recipe.teacher in BUNDLED or Path(recipe.teacher).expanduser().is_dir():
        teacher = resolve_teacher(recipe.teacher, recipe.revision)
        return teacher.label, check_source(teacher.folder)
    try:
        return recipe.teacher, AutoConfig.from_pretrained(recipe.teacher, revision=recipe.revision)
    except Exception as error:
        raise ConversionError(
            f"{recipe.teacher} is no model folder, and its configuration cannot be fetched: {str(error).splitlines()[0]}"
        ) from None


def _dtype(recipe: Recipe, machine: str) -> torch.dtype:
    name = recipe.dtype if recipe.dtype != "auto" else "float32" if machine == "cpu" else "bfloat16"
    return getattr(torch, name)


def _measured_rate() -> float:
    """float32 operations per second of this processor, from a matrix product."""
    x = torch.randn(768, 768)
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        x @ x
        best = min(best, time.perf_counter() - began)
    return 2 * 768**3 / best


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def _time(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.1f} s"
    return f"{hours * 60:.1f} min" if hours < 2 else f"{hours:,.1f} h"
