"""Training in shards (FSDP2): parameters, gradients and moments lie in pieces on all processes.

torch's `fully_shard` is used directly, not through accelerate, whose preparation rebuilds the model from a state dict:
a student shares tensors with its teacher, and its mixers hold the attention they replaced without registering it.
Here the modules are copied, their tensors are not; the copies are sharded mixer by mixer and block by block, and
trained values are gathered into the tensors they came from. On GPUs those wait in host memory meanwhile.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from linearize.convert.attention_spec import find_layers
from linearize.convert.errors import ConversionError
from linearize.convert.surgery import student_channel_mixers, student_mixers
from linearize.distill import processes
from linearize.distill.placement import Groups, Placement, adamw


class Sharded(Placement):
    """In pieces. Trained tensors of another type than the model's (new ones in float32) stay whole in each process.

    Raises:
        ConversionError: the launcher asks for FSDP1 or offloading, or the objective reaches around the modules.
    """

    def __init__(self, objective: nn.Module, groups: Groups) -> None:
        _check(objective)
        self.originals: dict[str, torch.Tensor] = {n: p for group in groups for n, p in group["params"].items()}
        self.device = next(iter(self.originals.values())).device
        self._shared = _parameters(_modules(objective))
        names = {id(p): name for name, p in objective.named_parameters()}
        self.objective = _copy(objective)
        self._shard(_of_other_types(objective))
        there = dict(self.objective.named_parameters())
        self.named = {name: there[names[id(p)]] for name, p in self.originals.items()}
        self.optimizer = adamw(_by_placement(groups, self.named))

    def _shard(self, whole: set[int]) -> None:
        """Shard the copied modules; on a GPU, only one block at a time is there in one piece."""
        mesh = init_device_mesh(self.device.type, (processes.count(),))
        again = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true") != "false"
        if self.device.type == "cuda":
            for parameter in self._shared:
                parameter.data = parameter.data.cpu()
        host = {id(p): p.data for p in self._shared}

        def shard(module: nn.Module, reshard: bool = again) -> None:
            inside = list(module.parameters())
            ignored = {p for p in inside if id(p) in whole}
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, ignored_params=ignored)
            for parameter in inside:
                if id(parameter) in host:
                    parameter.data = host[id(parameter)]  # fully_shard moved it to the GPU

        student, teacher = _models(self.objective)
        for model in (student,) if teacher is None else (student, teacher):
            for block in find_layers(model, model.config)[0]:
                for module in (*student_mixers(block), *student_channel_mixers(block), block):
                    shard(module)
        if teacher is not None:
            shard(teacher.get_decoder())
        shard(self.objective, reshard=False)
        placed: dict[int, nn.Parameter] = {}
        for module in _modules(self.objective):
            for name, held in module._parameters.items():
                if held is not None and (key := id(held)) in host:
                    if key not in placed:
                        placed[key] = nn.Parameter(held.data.to(self.device), held.requires_grad)
                    module._parameters[name] = placed[key]

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.objective.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield
        if last:
            for tensor in self.named.values():
                if tensor.grad is not None and not isinstance(tensor, DTensor):
                    tensor.grad.copy_(processes.summed(tensor.grad) / processes.count())

    def clip(self, largest: float) -> torch.Tensor:
        gradients = [t.grad for t in self.named.values() if t.grad is not None]
        shards = [g.to_local() for g in gradients if isinstance(g, DTensor)]
        whole = [g for g in gradients if not isinstance(g, DTensor)]
        zero = torch.zeros((), device=self.device)
        norm = (processes.summed(sum(map(_squares, shards), zero)) + sum(map(_squares, whole), zero)).sqrt()
        factor = (largest / (norm + 1e-6)).clamp_max(1.0)
        for gradient in (*shards, *whole):
            gradient.mul_(factor)
        return norm

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(like.device)
        return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor

    @torch.no_grad()
    def close(self) -> None:
        for name, original in self.originals.items():
            original.copy_(self.whole(self.named[name].detach()))
        del self.objective, self.optimizer, self.named
        for parameter in self._shared:
            parameter.data = parameter.data.to(self.device)


def _check(objective: nn.Module) -> None:
    from linearize.distill.stages.transfer import TransferObjective

    if os.environ.get("FSDP_VERSION", "2") != "2" or os.environ.get("FSDP_OFFLOAD_PARAMS", "false") == "true":
        raise ConversionError("the launcher asks for FSDP1 or fsdp_offload_params; use recipes/accelerate/fsdp2.yaml")
    if isinstance(objective, TransferObjective) and not objective.settings.teacher_forced:
        raise ConversionError("transfer with teacher_forced: false does not train in shards; use DDP")


def _modules(objective: nn.Module) -> Iterator[nn.Module]:
    """Every module that the objective runs: registered ones, what mixers keep of the teacher, the teacher beside."""
    seen: set[int] = set()
    waiting: list[nn.Module] = [objective]
    reference = objective.__dict__.get("reference")
    if reference is not None and not reference.zero_copy:
        waiting.append(reference.teacher)
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            waiting += [*module.children(), *(v for v in module.__dict__.values() if isinstance(v, nn.Module))]
            yield module


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    found = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    return list(found.values())


def _copy(objective: nn.Module) -> nn.Module:
    """New modules around the same tensors; a zero-copy teacher stays one."""
    reference = objective.__dict__.get("reference")
    memo: dict[int, Any] = {}
    for module in _modules(objective):
        memo |= {id(t): t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None}
    if reference is not None:
        held = reference.zero_copy
        if held:
            memo[id(reference.teacher)] = reference.teacher
    copied = copy.deepcopy(objective, memo)
    if reference is not None:
        copied.__dict__["reference"] = replace(copied.__dict__["reference"], held=held)
    return copied


def _models(objective: nn.Module) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The student, and the teacher if it stands beside it."""
    reference = objective.__dict__.get("reference")
    student: Any = objective.student
    return student, None if reference is None or reference.zero_copy else reference.teacher


def _of_other_types(objective: nn.Module) -> set[int]:
    """Ids of trained tensors that are not of the model's own type: those in one unit must be of one type."""
    student, _ = _models(objective)
    return {id(p) for p in objective.parameters() if p.requires_grad and p.dtype != student.dtype}


def _by_placement(groups: Groups, named: dict[str, torch.Tensor]) -> Groups:
    """Groups of shards and groups of whole tensors: one update cannot take both."""
    split: Groups = []
    for group in groups:
        for sharded in (True, False):
            members = {n: named[n] for n in group["params"] if isinstance(named[n], DTensor) is sharded}
            if members:
                split.append({**group, "params": members})
    return split


def _squares(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().square().sum()
