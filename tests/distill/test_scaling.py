"""Power laws: the fit finds known ones, its interval covers as often as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linearize.convert.errors import ConversionError
from linearize.distill.scaling import Run, fit_by_mixer, fit_power_law, student_t_quantile


@given(alpha=st.floats(-0.5, -0.01), beta=st.floats(1, 100), budgets=st.lists(
    st.floats(10, 20), min_size=3, max_size=8, unique_by=lambda x: round(x, 1)))  # fmt: skip
def test_a_law_without_noise_is_found_and_predicted(alpha: float, beta: float, budgets: list[float]) -> None:
    law = fit_power_law([Run("m", 10**c, beta * 10 ** (c * alpha)) for c in budgets])
    assert law.alpha == pytest.approx(alpha, rel=1e-6) and law.beta == pytest.approx(beta, rel=1e-4)
    low, high = law.interval(1e21)
    assert law.loss(1e21) == pytest.approx(beta * 1e21**alpha, rel=1e-5)
    assert low == pytest.approx(high, rel=1e-3)


@pytest.mark.parametrize(("freedom", "wanted"), [(1, 12.706), (2, 4.303), (5, 2.571), (30, 2.042)])
def test_students_t_is_that_of_the_tables(freedom: int, wanted: float) -> None:
    assert student_t_quantile(0.975, freedom) == pytest.approx(wanted, rel=1e-3)


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    budgets = np.logspace(12, 15, 5)
    inside = 0
    for _ in range(600):
        noise = np.exp(0.02 * rng.standard_normal(6))
        runs = [Run("m", c, 30 * c**-0.1 * n) for c, n in zip(budgets, noise[:5], strict=True)]
        low, high = fit_power_law(runs).interval(1e17, level=0.8)
        inside += low <= 30 * 1e17**-0.1 * noise[5] <= high
    assert inside / 600 == pytest.approx(0.8, abs=0.05)


def test_mixers_are_fitted_apart_and_errors_name_them() -> None:
    laws = fit_by_mixer([Run("a", 1e12, 3.0), Run("b", 1e12, 4.0), Run("a", 1e14, 2.0), Run("b", 1e14, 3.0)])
    assert laws["a"].alpha == pytest.approx(math.log(2 / 3) / math.log(100))
    assert laws["b"].alpha == pytest.approx(math.log(3 / 4) / math.log(100))
    with pytest.raises(ConversionError, match="three runs"):
        laws["a"].interval(1e15)
    with pytest.raises(ConversionError, match="gla: a power law needs runs of two different budgets"):
        fit_power_law([Run("gla", 1e12, 3.0), Run("gla", 1e12, 3.1)])
    with pytest.raises(ConversionError, match="positive and finite"):
        fit_power_law([Run("gla", 0.0, 3.0), Run("gla", 1e12, 3.1)])
