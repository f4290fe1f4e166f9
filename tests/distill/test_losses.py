"""Losses against their formulas, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from linearize.distill import losses
from linearize.distill.losses import distillation_loss, kl_divergence, normalized_error


def _problem(tokens: int = 37, vocab: int = 50) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(tokens, vocab, generator=generator, dtype=torch.float64) for _ in range(2))
    return student, teacher, torch.randint(vocab, (tokens,), generator=generator)


def test_value_and_gradient_equal_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_SLICE_ELEMENTS", 500)  # ten tokens a slice, the last one short
    student, teacher, labels = _problem()
    mine = student.float().requires_grad_()
    loss, ce, kl = distillation_loss(mine, teacher.float(), labels, 0.3, 0.7)
    loss.backward()

    exact = student.clone().requires_grad_()
    log_q, log_p = exact.log_softmax(-1), teacher.log_softmax(-1)
    exact_ce = sum(-log_q[i, label] for i, label in enumerate(labels)) / len(labels)
    exact_kl = sum((log_p[i].exp() * (log_p[i] - log_q[i])).sum() for i in range(len(labels))) / len(labels)
    (0.3 * exact_ce + 0.7 * exact_kl).backward()
    torch.testing.assert_close(ce.double(), exact_ce.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(kl.double(), exact_kl.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-5, atol=1e-8)


def test_losses_are_means_over_tokens() -> None:
    student, teacher, labels = _problem()
    once = distillation_loss(student.float(), teacher.float(), labels)
    twice = distillation_loss(student.float().repeat(2, 1), teacher.float().repeat(2, 1), labels.repeat(2))
    for a, b in zip(once, twice, strict=True):
        assert math.isclose(float(a), float(b), rel_tol=1e-6)
    assert math.isclose(float(kl_divergence(teacher, student)), float(once[2]), rel_tol=1e-5)


def test_normalized_error_is_one_for_nothing_and_zero_for_everything() -> None:
    target = torch.randn(3, 4, 5)
    assert float(normalized_error(torch.zeros_like(target), target)) == pytest.approx(1)
    assert float(normalized_error(target, target)) == 0
    assert float(normalized_error(1.1 * target * 1e-4, target * 1e-4)) == pytest.approx(0.01, rel=1e-3)
