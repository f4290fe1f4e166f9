"""Building the student from teacher and plan. No training."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.attention_spec import find_layers
from linearize.convert.calibration import calibrate, routed, teacher_route
from linearize.convert.channel_mixers import ChannelMixer
from linearize.convert.channel_mixers.base import teacher_route as mlp_route
from linearize.convert.checkpoint import load_teacher
from linearize.convert.mixers import Mixer
from linearize.convert.model import PACKAGE_VERSION, install_mixers, student_classes
from linearize.convert.plan import Plan, make_plan

Part = TypeVar("Part", Mixer, ChannelMixer)


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
        with as_teacher(student):
            calibrate(student.eval(), student_mixers(student), calibration.to(student.device))
        student.train(training)
    return student


def _fields(config: Any) -> dict[str, Any]:
    fields = config.to_dict()
    for name in ("model_type", "auto_map", "transformers_version", "architectures"):
        fields.pop(name, None)
    return fields


@contextlib.contextmanager
def as_teacher(student: nn.Module) -> Iterator[None]:
    """Context: the student computes exactly what its teacher does, from the same tensors.

    Adapters on the projections of mixers and channel mixers are off by construction; adapters elsewhere must be
    switched off too.
    """
    with routed(student_mixers(student), teacher_route), routed(student_channel_mixers(student), mlp_route):
        yield


def student_mixers(model: nn.Module) -> list[Mixer]:
    """All mixers inside a module, in layer order (works through wrappers such as PEFT's).

    A mixer that is part of another one is not listed.
    """
    return sorted(_outermost(model, Mixer).values(), key=lambda mixer: mixer.layer_idx)


def student_channel_mixers(model: nn.Module) -> list[ChannelMixer]:
    """All channel mixers inside a module, in layer order."""
    return sorted(_outermost(model, ChannelMixer).values(), key=lambda channel_mixer: channel_mixer.layer_idx)


def new_parameters(student: nn.Module) -> dict[str, nn.Parameter]:
    """Every tensor that the teacher does not have, in mixers and channel mixers, by its name inside the student."""
    parts: dict[str, Any] = {**_outermost(student, Mixer), **_outermost(student, ChannelMixer)}
    return {f"{prefix}.{name}": p for prefix, part in parts.items() for name, p in part.new_parameters().items()}


def _outermost(model: nn.Module, kind: type[Part], prefix: str = "") -> dict[str, Part]:
    """Modules of a kind by name, without those inside another of the kind."""
    found: dict[str, Part] = {}
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        found |= {path: child} if isinstance(child, kind) else _outermost(child, kind, f"{path}.")
    return found
