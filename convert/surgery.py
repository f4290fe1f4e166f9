"""Building the student from teacher and plan. No training."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.attention_spec import find_layers
from linearize.convert.calibration import calibrate, routed, teacher_route
from linearize.convert.checkpoint import load_teacher
from linearize.convert.mixers import Mixer
from linearize.convert.model import PACKAGE_VERSION, install_mixers, student_classes
from linearize.convert.plan import Plan, make_plan


def build_student(
    teacher: PreTrainedModel | str | Path,
    to: str | Plan = "rodimus",
    keep_softmax: str | None = None,
    calibration: torch.Tensor | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The teacher with other mixers, untrained. Every tensor of the teacher is shared with it, not copied.

    Args:
        teacher: a loaded decoder, or the path or Hub id of one.
        to: a mixer's name, or a whole plan.
        keep_softmax: layers that keep the teacher's attention: "0,3" or "25%".
        calibration: token ids `[B, T]` from which mixers set their new tensors in closed form.
        options: options of the mixer, such as `window=64`.

    Raises:
        ConversionError: the teacher or the plan cannot be converted; the message says why.
    """
    model = teacher if isinstance(teacher, PreTrainedModel) else load_teacher(teacher)
    config = model.config
    plan = to if isinstance(to, Plan) else make_plan(config.num_hidden_layers, to, keep_softmax, **options)
    find_layers(model, config)  # says what is missing before anything is built

    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    student = copy.deepcopy(model, shared)
    config_class, model_class = student_classes(config.model_type)
    field = {"version": PACKAGE_VERSION, "base_model_type": config.model_type, "layers": plan.to_config()}
    student.__class__ = model_class
    student.config = config_class(**{**_fields(config), "linearize": field, "architectures": [model_class.__name__]})
    student.config._attn_implementation = config._attn_implementation
    for module in student.modules():
        if getattr(module, "config", None).__class__ is config.__class__:
            module.__dict__["config"] = student.config
    install_mixers(student, plan)
    nn.Module.to(student, device=next(model.parameters()).device)
    if calibration is not None and plan.converted:
        training = student.training
        calibrate(student.eval(), student_mixers(student), calibration.to(student.device))
        student.train(training)
    return student


def _fields(config: Any) -> dict[str, Any]:
    fields = config.to_dict()
    for name in ("model_type", "auto_map", "transformers_version", "architectures"):
        fields.pop(name, None)
    return fields


def as_teacher(student: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context: the student computes exactly what its teacher does, from the same tensors.

    Adapters on the attention's projections are off by construction; adapters elsewhere must be switched off too.
    """
    return routed(student_mixers(student), teacher_route)


def student_mixers(model: nn.Module) -> list[Mixer]:
    """All mixers inside a module, in layer order (works through wrappers such as PEFT's)."""
    mixers = [cast(Mixer, m) for m in model.modules() if isinstance(m, Mixer)]
    return sorted(mixers, key=lambda mixer: mixer.layer_idx)
