"""What trains: groups of tensors by where they stand, each with a rate of its own; and what that leaves shared.

    new ⊂ mixer ⊂ layer ⊂ all,   and adapters beside them

A tensor takes the rate of the narrowest group that is named; the rest is frozen.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from linearize.convert.attention_spec import find_layers
from linearize.convert.surgery import student_channel_mixers, student_mixers

Group = Literal["new", "adapters", "mixer", "layer", "all"]
GROUPS: tuple[Group, ...] = ("new", "adapters", "mixer", "layer", "all")
_WIDER: dict[Group, tuple[Group, ...]] = {
    "new": ("new", "mixer", "layer", "all"),
    "adapters": ("adapters",),
    "mixer": ("mixer", "layer", "all"),
    "layer": ("layer", "all"),
    "all": ("all",),
}


def group_members(
    student: PreTrainedModel, new: frozenset[str], layers: set[int] | None = None
) -> dict[Group, dict[str, nn.Parameter]]:
    """Every tensor of the student under the narrowest group it belongs to.

    Args:
        new: names of the tensors that the teacher lacks.
        layers: leave out what belongs to other blocks than these; None for none.
    """
    names = {module: name for name, module in student.named_modules()}
    parts = [f"{names[part]}." for part in (*student_mixers(student), *student_channel_mixers(student))]
    blocks = [f"{names[block]}." for block in find_layers(student, student.config)[0]]
    members: dict[Group, dict[str, nn.Parameter]] = {group: {} for group in GROUPS}
    for name, parameter in student.named_parameters():
        block = next((i for i, prefix in enumerate(blocks) if name.startswith(prefix)), None)
        if layers is not None and block is not None and block not in layers:
            continue
        group: Group = "all" if block is None else "layer"
        if any(name.startswith(prefix) for prefix in parts):
            group = "mixer"
        if name in new:
            group = "new"
        if ".lora_" in name:
            group = "adapters"
        members[group][name] = parameter
    return members


def trainable_groups(
    student: PreTrainedModel,
    new: frozenset[str],
    rates: dict[Group, float],
    weight_decay: float = 0.0,
    layers: set[int] | None = None,
) -> list[dict[str, Any]]:
    """Optimizer groups `{"group", "params": {name: tensor}, "lr", "weight_decay"}`; everything else is frozen.

    Args:
        new, layers: see `group_members`.
        rates: highest rate by group.
    """
    groups: list[dict[str, Any]] = []
    for group, parameters in group_members(student, new, layers).items():
        rate = next((rates[wider] for wider in _WIDER[group] if wider in rates), None)
        if parameters and rate is not None:
            groups.append({"group": group, "params": parameters, "lr": rate, "weight_decay": weight_decay})
    wanted = {id(p) for group in groups for p in group["params"].values()}
    for parameter in student.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
    return groups


def untie(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    new: frozenset[str],
    rates: dict[Group, float],
    layers: set[int] | None = None,
) -> None:
    """Give the student copies of the teacher's tensors that are about to train, in place.

    The mixers' `attention` and the channel mixers' `mlp` keep the originals, so that a student whose mixers alone
    train still holds its teacher.
    """
    theirs = {id(p) for p in teacher.parameters()}
    wanted = {
        id(p)
        for group, parameters in group_members(student, new, layers).items()
        if any(wider in rates for wider in _WIDER[group])
        for p in parameters.values()
        if id(p) in theirs
    }
    if not wanted:
        return
    originals = [(mixer, mixer.attention) for mixer in student_mixers(student)]
    for part, original in (*originals, *((m, m.mlp) for m in student_channel_mixers(student))):
        shared = {id(module) for module in original.modules()}
        for name, child in list(part.named_children()):
            if id(child) in shared and any(id(p) in wanted for p in child.parameters()):
                setattr(part, name, copy.deepcopy(child))
    copies: dict[int, nn.Parameter] = {}
    for module in student.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in wanted:
                copies.setdefault(id(parameter), nn.Parameter(parameter.detach().clone()))
                module._parameters[name] = copies[id(parameter)]


def manifest(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What trains, as it is saved: per group its rate, its size and the names of its tensors."""
    return [
        {
            "group": group["group"],
            "learning_rate": group["lr"],
            "parameters": sum(p.numel() for p in group["params"].values()),
            "tensors": sorted(group["params"]),
        }
        for group in groups
    ]


def describe_manifest(groups: list[dict[str, Any]]) -> str:
    """One line: how many tensors and numbers of each group train, at which rate."""
    return "; ".join(
        f"{len(entry['tensors'])} tensors of group {entry['group']} ({entry['parameters']:,} numbers, "
        f"rate {entry['learning_rate']:g})"
        for entry in manifest(groups)
    )
