"""Losses against their formulas, by hand."""

from __future__ import annotations

import pytest
import torch

from linearize.distill.losses import normalized_error


def test_normalized_error_is_one_for_nothing_and_zero_for_everything() -> None:
    target = torch.randn(3, 4, 5)
    assert float(normalized_error(torch.zeros_like(target), target)) == pytest.approx(1)
    assert float(normalized_error(target, target)) == 0
    assert float(normalized_error(1.1 * target * 1e-4, target * 1e-4)) == pytest.approx(0.01, rel=1e-3)
