"""Low-rank adapters on a student's mixers: attach, switch off, merge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from linearize.convert.surgery import student_mixers


def attach_adapters(student: nn.Module, rank: int, alpha: int) -> None:
    """Put LoRA on the projections of every mixer, in place. The teacher's attention keeps the bare projections."""
    names = {module: name for name, module in student.named_modules()}
    targets = [f"{names[m]}.{p}" for m in student_mixers(student) for p in m.spec.projection_names]
    if targets and not has_adapters(student):
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, bias="none")
        inject_adapter_in_model(config, student)


def has_adapters(student: nn.Module) -> bool:
    return any(isinstance(module, BaseTunerLayer) for module in student.modules())


@contextmanager
def adapters_off(student: nn.Module) -> Iterator[None]:
    """The base model without its adapters."""
    layers = [module for module in student.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merge_adapters(student: nn.Module) -> None:
    """Fold the adapters into fresh copies of their base weights and remove them, in place.

    The base modules themselves stay as they are: the teacher is made of them.
    """
    for parent in list(student.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, BaseTunerLayer):
                child: Any = module
                base = child.get_base_layer()
                merged = type(base)(base.in_features, base.out_features, base.bias is not None, device="meta")
                delta: Any = sum(child.get_delta_weight(adapter) for adapter in child.active_adapters)
                merged.weight = nn.Parameter((base.weight.float() + delta.float()).to(base.weight.dtype), False)
                if base.bias is not None:
                    merged.bias = base.bias
                setattr(parent, name, merged.train(base.training))


def trainable_groups(
    student: nn.Module, new_lr: float | None, adapter_lr: float | None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Optimizer groups: the mixers' new tensors and the adapters, each at its own rate; None leaves a kind frozen.

    Everything else is frozen. Raises AssertionError if a tensor meant to train is not reachable by name.
    """
    new: dict[str, nn.Parameter] = {}
    names = {module: name for name, module in student.named_modules()}
    for mixer in student_mixers(student):
        new |= {f"{names[mixer]}.{name}": p for name, p in mixer.new_parameters().items()}
    adapters = {name: p for name, p in student.named_parameters() if "lora_" in name}
    groups: list[dict[str, Any]] = []
    for parameters, lr in ((new, new_lr), (adapters, adapter_lr)):
        if parameters and lr is not None:
            groups.append({"params": parameters, "lr": lr, "weight_decay": weight_decay})
    wanted = {id(p) for group in groups for p in group["params"].values()}
    for parameter in student.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
        wanted.discard(id(parameter))
    assert not wanted, f"{len(wanted)} tensors that should train are no parameters of the student"
    return groups
