"""Low-rank adapters on a student: attach, switch off, merge."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.attention_spec import find_layers
from linearize.convert.errors import ConversionError
from linearize.convert.surgery import student_mixers


def adapter_targets(student: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Full names of the modules that get adapters.

    Args:
        targets: "attention" for every projection of the mixers, "mlp" for every linear layer of the blocks outside
            their attention, or the projections' own names, such as "q_proj" or "down_proj".

    Raises:
        ConversionError: a target is neither; names those there are.
    """
    names = {module: name for name, module in student.named_modules()}
    attention = [f"{names[mixer]}.{p}" for mixer in student_mixers(student) for p in mixer.spec.projection_names]
    layers, attention_name = find_layers(student, student.config)
    mlp = [
        f"{names[block]}.{name}"
        for block in layers
        for name, module in block.named_modules()
        if not name.startswith(f"{attention_name}.") and (isinstance(module, nn.Linear) or _is_adapted(module))
        if ".base_layer" not in name and ".lora_" not in name
    ]
    short = {name.rpartition(".")[2] for name in (*attention, *mlp)}
    if attention and (unknown := [t for t in targets if t not in short | {"attention", "mlp"}]):
        raise ConversionError(
            f"targets: there is no projection {unknown[0]!r} to adapt; use attention, mlp or {', '.join(sorted(short))}"
        )
    chosen = [name for name in attention if "attention" in targets or name.rpartition(".")[2] in targets]
    return chosen + [name for name in mlp if "mlp" in targets or name.rpartition(".")[2] in targets]


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(module, BaseTunerLayer)


def attach_adapters(student: PreTrainedModel, rank: int, alpha: int, targets: Sequence[str] = ("attention",)) -> None:
    """Put LoRA on projections, in place. The teacher's attention inside the mixers keeps the bare projections.

    Adapters of the same kind that are there already stay as they are; others are merged first.
    """
    wanted = adapter_targets(student, targets)
    there = {name: module for name, module in student.named_modules() if isinstance(module, LoraLayer)}
    if there:
        same = all(m.r["default"] == rank and m.lora_alpha["default"] == alpha for m in there.values())
        if same and set(there) == set(wanted):
            return
        merge_adapters(student)
    if wanted:
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=wanted, lora_dropout=0.0, bias="none")
        inject_adapter_in_model(config, student)


def checkpoint_name(name: str) -> str:
    """The exported tensor that a student's tensor becomes, or an adapter is merged into."""
    return re.sub(r"\.lora_[AB]\.default\.weight$", ".weight", name.replace(".base_layer.", "."))


@contextmanager
def adapters_off(student: nn.Module) -> Iterator[None]:
    """The base model without its adapters."""
    layers: list[Any] = [module for module in student.modules() if _is_adapted(module)]
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
    student.__dict__.pop("peft_config", None)  # else the next adapters would be taken for second ones
