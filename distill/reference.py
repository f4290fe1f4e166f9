"""The teacher that a student is trained towards, without a second copy of it where that can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.errors import ConversionError
from linearize.convert.surgery import as_teacher, student_channel_mixers, student_mixers
from linearize.distill import layout
from linearize.distill.adapters import adapters_off


@dataclass(frozen=True)
class Reference:
    """A frozen model to imitate: the teacher inside a student, or one that stands beside it.

    As long as a student holds every tensor of its teacher (its mixers keep the attention they replace), its own body
    with adapters off and softmax on is the teacher. Once a stage has trained blocks, norms or embeddings, the loaded
    teacher is used: it shares what is still untrained and costs as much memory as the tensors that were copied to be
    trained.

    Attributes:
        teacher: the teacher as it was loaded, or any other model of the same vocabulary.
        held: whether the student holds its teacher, where that can no longer be seen (in shards); None: look.
    """

    student: PreTrainedModel
    teacher: PreTrainedModel
    held: bool | None = None

    @property
    def zero_copy(self) -> bool:
        """Whether the student holds its teacher."""
        return holds_teacher(self.student, self.teacher) if self.held is None else self.held

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """Context: a model that computes what the teacher does; without gradients."""
        with torch.no_grad():
            if not self.zero_copy:
                yield self.teacher
                return
            with as_teacher(self.student), adapters_off(self.student):
                yield self.student


def holds_teacher(student: nn.Module, teacher: nn.Module) -> bool:
    """Whether every tensor of the teacher is still one of the student's, or inside its mixers."""
    held = {id(p) for p in student.parameters()}
    for mixer in student_mixers(student):
        held |= {id(p) for p in mixer.attention.parameters()}
    for channel_mixer in student_channel_mixers(student):
        held |= {id(p) for p in channel_mixer.mlp.parameters()}
    return all(id(p) in held for p in teacher.parameters())


def teacher_logits(student: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """The logits `[B, T, vocab]` of the teacher inside a student that still holds it."""
    with as_teacher(student), adapters_off(student):
        return student(input_ids=input_ids, use_cache=False).logits


def last_hidden(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """What the head reads, `[B, T, D]`; documents apart where `layout` says so."""
    return model.get_decoder()(input_ids=input_ids, use_cache=False, **layout.arguments()).last_hidden_state


@dataclass(frozen=True)
class Head:
    """A language model's head: logits = softcap · tanh(scale · (hidden weightᵀ + bias) / softcap)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    scale: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """Read a model's head off its configuration."""
        output: Any = model.get_output_embeddings()
        config = model.config
        divisor = getattr(config, "logits_scaling", None)
        scale = getattr(config, "logit_scale", None) or (1 / divisor if divisor else 1.0)
        bias = getattr(output, "bias", None)
        return cls(output.weight, bias, getattr(config, "final_logit_softcapping", None), float(scale))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[..., D]` -> `[..., vocab]`."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise `ConversionError` if the model computes other logits than its `Head` says."""
    if model.device.type == "meta":  # no numbers to compare
        return
    ids = torch.arange(2, device=model.device)[None] % model.config.vocab_size
    direct = model(input_ids=ids, use_cache=False).logits.float()
    computed = Head.of(model).logits(last_hidden(model, ids)).float()
    if not torch.allclose(direct, computed, rtol=1e-2, atol=1e-2 * float(direct.abs().max())):
        raise ConversionError(
            f"{type(model).__name__} does more to its logits than a linear head, a scale and a soft cap; "
            "its stages can use transfer, matrix and hidden only"
        )
