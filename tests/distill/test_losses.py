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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_normalized_error_of_16_bits_is_that_of_float32(dtype: torch.dtype) -> None:
    target = torch.randn(64, 96).to(dtype)
    output = (target + 0.3 * torch.randn(64, 96)).to(dtype).requires_grad_()
    wide = output.detach().float().requires_grad_()
    mine, exact = normalized_error(output, target), normalized_error(wide, target.float())
    (3 * mine).backward()
    (3 * exact).backward()
    assert mine.dtype == torch.float32
    assert float(mine.detach()) == pytest.approx(float(exact.detach()), rel=1e-3)
    torch.testing.assert_close(output.grad.float(), wide.grad, rtol=1e-2, atol=1e-7)  # float16 is coarse near 0
