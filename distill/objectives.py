"""Distillation of next-token predictions, from hidden states and heads: logits of all tokens are never held."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from linearize.distill.layout import IGNORED
from linearize.distill.reference import Head, Reference, last_hidden
from linearize.kernels.linear_loss import linear_cross_entropy, linear_kl

_SLICE_ELEMENTS = 2**22


def inputs_and_labels(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[B, T]` and what to predict at each position but the last, `[B (T-1)]`.

    Args:
        batch: ids `[B, T]`, or ids and labels `[B, 2, T]` with `IGNORED` where nothing is to be learned.
    """
    ids, labels = (batch, batch) if batch.dim() == 2 else batch.unbind(1)
    return ids, labels[:, 1:].flatten()


class DistillObjective(nn.Module):
    """`ce_weight · CE + kl_weight · KL`, means over the tokens that count.

    Args:
        reference: the teacher; it is not run where `kl_weight` is 0.
        direction: "forward", KL(teacher ‖ student), or "reverse".
        temperature: both distributions of the KL are softmax(logits / temperature).
    """

    def __init__(
        self,
        student: Any,
        reference: Reference,
        ce_weight: float = 0.0,
        kl_weight: float = 1.0,
        direction: Literal["forward", "reverse"] = "forward",
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.student = student
        self.__dict__["reference"] = reference  # not a submodule: nothing of it trains
        self.ce_weight, self.kl_weight = ce_weight, kl_weight
        self.direction, self.temperature = direction, temperature

    reference: Reference

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """batch as `inputs_and_labels` -> scalar loss."""
        ids, labels = inputs_and_labels(batch)
        if not self.kl_weight:
            hidden, head = self.predictions(ids)
            loss = linear_cross_entropy(
                hidden, head.weight, labels, bias=head.bias, softcap=head.softcap, logit_scale=head.scale
            )
            return self.ce_weight * loss
        with self.reference.model() as teacher:  # before the student: its activations are gone when theirs come
            target, their = last_hidden(teacher, ids)[:, :-1].flatten(0, 1), Head.of(teacher)
        hidden, head = self.predictions(ids)
        return linear_kl(
            hidden,
            head.weight,
            target,
            their.weight,
            direction=self.direction,
            temperature=self.temperature,
            labels=labels,
            ce_weight=self.ce_weight,
            kl_weight=self.kl_weight,
            bias=head.bias,
            teacher_bias=their.bias,
            softcap=head.softcap,
            logit_scale=head.scale,
        ).loss

    def predictions(self, ids: torch.Tensor) -> tuple[torch.Tensor, Head]:
        """The student's hidden states `[B (T-1), D]` and its head."""
        return last_hidden(self.student, ids)[:, :-1].flatten(0, 1), Head.of(self.student)


def over_slices(hidden: torch.Tensor, head: Head, function: Any, *rows: torch.Tensor) -> torch.Tensor:
    """`function(logits, *rows)` over slices of the tokens, joined; logits float32, made again for the gradient.

    Args:
        hidden: `[N, D]`.
        rows: tensors of N rows that are sliced alike.

    Returns:
        What `function` gives per token, `[N, ...]`.
    """

    def part(hidden: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        return function(head.logits(hidden).float(), *rows)

    count = max(1, _SLICE_ELEMENTS // head.weight.shape[0])
    slices = zip(hidden.split(count), *(r.split(count) for r in rows), strict=True)
    return torch.cat([checkpoint(part, *piece, use_reentrant=False) for piece in slices])


def token_log_probs(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[N]` of labels `[N]`, 0 where they are `IGNORED`; hidden `[N, D]`."""

    def function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")

    return over_slices(hidden, head, function, labels)
