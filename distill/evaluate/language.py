"""Perplexity, and closeness to the teacher, on held-out text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from linearize.convert.surgery import student_mixers
from linearize.distill.data import TokenBlocks
from linearize.distill.progress import meter
from linearize.distill.reference import teacher_logits

_SLICE_ELEMENTS = 2**22
"""Logits that are widened to float32 at a time."""
_LARGEST_EXPONENT = 700.0  # e^700 is still a float64


def perplexity(loss: float) -> float:
    """`exp(loss)`, kept finite."""
    return math.exp(min(loss, _LARGEST_EXPONENT))


@dataclass(frozen=True)
class LanguageScore:
    """Means over all predicted tokens of the held-out blocks.

    Attributes:
        loss, teacher_loss: nats per token.
        kl: KL(teacher ‖ student), nats per token.
        top1_agreement: share of tokens where both put the same token first.
        top5_agreement: share of tokens where the teacher's first choice is among the student's first five.
        tokens: how many were predicted.
        bytes: of UTF-8 text that the predicted tokens stand for; None when not counted.
    """

    loss: float
    teacher_loss: float
    kl: float
    top1_agreement: float
    top5_agreement: float
    tokens: int
    bytes: int | None = None

    @classmethod
    def of(cls, means: torch.Tensor, tokens: int, size: int | None = None) -> LanguageScore:
        """From the five means in the order of `language_sums`."""
        loss, teacher_loss, kl, first, fifth = means.tolist()
        return cls(loss, teacher_loss, kl, first, fifth, tokens, size)

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def teacher_perplexity(self) -> float:
        return perplexity(self.teacher_loss)

    @property
    def byte_perplexity(self) -> float | None:
        """Perplexity per byte of text, which does not depend on the tokenizer."""
        return self._per_byte(self.loss)

    @property
    def teacher_byte_perplexity(self) -> float | None:
        return self._per_byte(self.teacher_loss)

    def _per_byte(self, loss: float) -> float | None:
        return perplexity(loss * self.tokens / self.bytes) if self.bytes else None


@torch.no_grad()
def score_language(
    student: nn.Module,
    data: TokenBlocks,
    batch_size: int = 4,
    name: str = "measure",
    teacher: nn.Module | None = None,
    tokenizer: Any = None,
) -> LanguageScore:
    """Run student and teacher over every block once, in order.

    Args:
        teacher: None for the one inside an unmerged student.
        tokenizer: counts the bytes; None leaves them out.
    """
    training = student.training
    student.eval()
    device = next(student.parameters()).device
    sums = torch.zeros(5, dtype=torch.float64)
    blocks = data.blocks.split(batch_size)
    has_mixers = bool(student_mixers(student))
    with meter(name, len(blocks)) as progress:
        for i, ids in enumerate(blocks):
            ids = ids.to(device)
            logits = student(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            if teacher is not None:
                reference = teacher(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            else:
                reference = teacher_logits(student, ids)[:, :-1].flatten(0, 1) if has_mixers else logits
            sums += language_sums(logits, reference, ids[:, 1:].flatten())
            progress.update(i + 1, ids.numel())
    student.train(training)
    tokens = data.blocks[:, 1:].numel()
    size = None if tokenizer is None else text_bytes(data.blocks[:, 1:], tokenizer)
    return LanguageScore.of(sums / tokens, tokens, size)


def text_bytes(ids: torch.Tensor, tokenizer: Any) -> int:
    """UTF-8 bytes of the text of `ids` `[N, T]`, row by row, special tokens left out."""
    rows = tokenizer.batch_decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return sum(len(row.encode("utf-8", "ignore")) for row in rows)


def language_sums(logits: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sums over tokens: loss, the teacher's loss, KL, agreement in the first and in the first five."""
    total = torch.zeros(5, dtype=torch.float64)
    rows = max(1, _SLICE_ELEMENTS // logits.shape[-1])
    for q, p, label in zip(logits.split(rows), reference.split(rows), labels.split(rows), strict=True):
        log_q, log_p = q.float().log_softmax(-1), p.float().log_softmax(-1)
        nll = -log_q.gather(-1, label[:, None]).sum()
        teacher_nll = -log_p.gather(-1, label[:, None]).sum()
        kl = (log_p.exp() * (log_p - log_q)).sum()
        choice = log_p.argmax(-1, keepdim=True)
        first = (log_q.argmax(-1, keepdim=True) == choice).sum()
        fifth = (log_q.topk(min(5, log_q.shape[-1])).indices == choice).sum()
        total += torch.stack([nll, teacher_nll, kl, first.float(), fifth.float()]).double().cpu()
    return total
