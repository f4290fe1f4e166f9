"""Losses as per-token means, computed in float32 over slices of the tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_SLICE_ELEMENTS = 2**20
"""Logits per slice: the float32 copies of a slice stay in a CPU's cache."""


class _DistillationLoss(torch.autograd.Function):
    """Loss and gradient in one pass: the gradient of the logits is known as soon as the loss is."""

    @staticmethod
    def forward(
        ctx: Any, student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, ce_weight: float, kl_weight: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = student.shape[0]
        ce = student.new_zeros((), dtype=torch.float32)
        kl = student.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(student)
        rows = max(1, _SLICE_ELEMENTS // student.shape[1])
        for start in range(0, total, rows):
            part = slice(start, start + rows)
            log_p = teacher[part].log_softmax(-1, dtype=torch.float32)
            log_q = student[part].log_softmax(-1, dtype=torch.float32)
            p = log_p.exp()
            ce -= log_q.gather(-1, labels[part, None]).sum()
            kl += torch.dot(p.flatten(), log_p.sub_(log_q).flatten())
            slope = log_q.exp_().mul_(ce_weight + kl_weight).sub_(p, alpha=kl_weight)
            slope.scatter_add_(-1, labels[part, None], torch.full_like(slope[:, :1], -ce_weight))
            gradient[part] = (slope / total).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ce, kl = ce / total, kl / total
        ctx.mark_non_differentiable(ce, kl)
        return ce_weight * ce + kl_weight * kl, ce, kl

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None, None, None


def distillation_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor,
    ce_weight: float = 1.0,
    kl_weight: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ce_weight · cross-entropy + kl_weight · KL(teacher ‖ student)`, both means over tokens, in nats.

    Args:
        student_logits, teacher_logits: `[N, vocab]`, any float dtype.
        labels: `[N]` next tokens.

    Returns:
        The loss (differentiable in the student's logits), and cross-entropy and KL for reporting.
    """
    return _DistillationLoss.apply(student_logits, teacher_logits, labels, ce_weight, kl_weight)


def kl_divergence(teacher_logits: torch.Tensor, student_logits: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) in nats, the mean over all tokens, float32; no gradient trick, for measuring."""
    log_p = teacher_logits.float().log_softmax(-1)
    log_q = student_logits.float().log_softmax(-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).mean()


def normalized_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`‖output - target‖² / ‖target‖²` in float32: 1 for a zero output, whatever the layer's scale."""
    target = target.float()
    return (output.float() - target).square().sum() / target.square().sum().clamp_min(1e-12)
