"""Perplexity, and closeness to the teacher, on held-out text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from linearize.convert.surgery import student_mixers
from linearize.distill.data import TokenBlocks
from linearize.distill.progress import meter
from linearize.distill.stages.lora import teacher_logits


@dataclass(frozen=True)
class LanguageScore:
    """Means over all predicted tokens of the held-out blocks.

    Attributes:
        loss, teacher_loss: nats per token.
        kl: KL(teacher ‖ student), nats per token.
        top1_agreement: share of tokens where both put the same token first.
        tokens: how many were predicted.
    """

    loss: float
    teacher_loss: float
    kl: float
    top1_agreement: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def teacher_perplexity(self) -> float:
        return math.exp(self.teacher_loss)


@torch.no_grad()
def score_language(student: nn.Module, data: TokenBlocks, batch_size: int = 4, name: str = "measure") -> LanguageScore:
    """Run student and teacher over every block once, in order."""
    training = student.training
    student.eval()
    device = next(student.parameters()).device
    sums = torch.zeros(4, dtype=torch.float64)
    blocks = data.blocks.split(batch_size)
    has_mixers = bool(student_mixers(student))
    with meter(name, len(blocks)) as progress:
        for i, ids in enumerate(blocks):
            ids = ids.to(device)
            logits = student(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            reference = teacher_logits(student, ids)[:, :-1].flatten(0, 1).float() if has_mixers else logits
            sums += _sums(logits, reference, ids[:, 1:].flatten())
            progress.update(i + 1, ids.numel())
    student.train(training)
    tokens = data.blocks[:, 1:].numel()
    loss, teacher_loss, kl, agreement = (sums / tokens).tolist()
    return LanguageScore(loss, teacher_loss, kl, agreement, tokens)


def _sums(logits: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    log_q, log_p = logits.log_softmax(-1), reference.log_softmax(-1)
    nll = -log_q.gather(-1, labels[:, None]).sum()
    teacher_nll = -log_p.gather(-1, labels[:, None]).sum()
    kl = (log_p.exp() * (log_p - log_q)).sum()
    agreement = (log_q.argmax(-1) == log_p.argmax(-1)).sum()
    return torch.stack([nll, teacher_nll, kl, agreement.float()]).double().cpu()
