"""How far a student is from its teacher right after surgery, layer by layer and at the end. No training."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from linearize.convert.calibration import routed, teacher_route
from linearize.convert.mixers import Mixer
from linearize.convert.surgery import as_teacher, student_mixers


@dataclass(frozen=True)
class SurgeryError:
    """Distances on some text.

    Attributes:
        layers: converted layer -> `‖mine - teacher's‖ / ‖teacher's‖` of the attention's output (after its output
            projection) at the teacher's own input of that layer, so that no layer sees another's mistakes.
        logits: `‖student - teacher‖ / ‖teacher‖` of the logits, both less their mean over the vocabulary, to which
            the softmax is blind.
        kl: KL(teacher ‖ student), nats per token.
        loss, teacher_loss: cross-entropy with the text, nats per token.
        tokens: how many were read.
        residuals: converted layer -> `Mixer.residual`, of those that have one.
    """

    layers: dict[int, float]
    logits: float
    kl: float
    loss: float
    teacher_loss: float
    tokens: int
    residuals: dict[int, float]

    @property
    def attention(self) -> float:
        """Root mean square of the layers' errors; 0 where none was converted."""
        return math.sqrt(sum(e * e for e in self.layers.values()) / max(1, len(self.layers)))

    @property
    def perplexity_ratio(self) -> float:
        """Student's perplexity over its teacher's; infinite beyond what a float holds."""
        difference = self.loss - self.teacher_loss
        return math.exp(difference) if difference < 700 else math.inf

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "attention": self.attention, "perplexity_ratio": self.perplexity_ratio}


@torch.no_grad()
def surgery_error(student: nn.Module, input_ids: torch.Tensor, batch_size: int = 2) -> SurgeryError:
    """Measure a student against the teacher inside it.

    Args:
        input_ids: `[N, T]`, T at least 2.
        batch_size: sequences that are read at a time.
    """
    training = student.training
    student.eval()
    layers: dict[int, torch.Tensor] = {}
    totals = torch.zeros(5, dtype=torch.float64)
    device = next(student.parameters()).device
    for ids in input_ids.split(batch_size):
        ids = ids.to(device)
        reference = _teacher_pass(student, ids, layers)
        logits = student(input_ids=ids, use_cache=False).logits
        for mine, theirs, row in zip(logits, reference, ids, strict=True):
            totals += _distances(mine.float(), theirs.float(), row).cpu()
    student.train(training)
    error, size, kl, loss, teacher_loss = totals.tolist()
    predicted = input_ids[:, 1:].numel()
    return SurgeryError(
        layers={i: math.sqrt(float(s[0] / s[1])) for i, s in sorted(layers.items())},
        logits=math.sqrt(error / size),
        kl=kl / predicted,
        loss=loss / predicted,
        teacher_loss=teacher_loss / predicted,
        tokens=input_ids.numel(),
        residuals={m.layer_idx: m.residual for m in student_mixers(student) if m.residual is not None},
    )


def _teacher_pass(student: nn.Module, ids: torch.Tensor, layers: dict[int, torch.Tensor]) -> torch.Tensor:
    """The teacher's logits; adds every mixer's squared error and the teacher's squared size to `layers`."""

    def route(mixer: Mixer, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        target, _ = teacher_route(mixer, hidden_states, **kwargs)
        mine, _ = mixer.attend(hidden_states, **{**kwargs, "past_key_values": None})
        layers[mixer.layer_idx] = layers.get(mixer.layer_idx, 0) + error_and_size(mine, target)
        return target, None

    with as_teacher(student), routed(student_mixers(student), route):
        return student(input_ids=ids, use_cache=False).logits


def error_and_size(mine: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`‖mine - target‖²` and `‖target‖²`, `[2]` float64 on the CPU."""
    mine, target = mine.double(), target.double()
    return torch.stack([(mine - target).square().sum(), target.square().sum()]).cpu()


def _distances(logits: torch.Tensor, reference: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Sums over one sequence's `[T, vocab]`: squared error and size of the logits, KL, and both losses."""
    mine, theirs = (x - x.mean(-1, keepdim=True) for x in (logits, reference))
    log_q, log_p = logits[:-1].log_softmax(-1), reference[:-1].log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum()
    losses = [-x.gather(-1, ids[1:, None]).sum() for x in (log_q, log_p)]
    return torch.stack([(mine - theirs).square().sum(), theirs.square().sum(), kl, *losses]).double()
