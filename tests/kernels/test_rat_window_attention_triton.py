"""RAT with a window: its Triton kernels in Triton's CPU interpreter.

Triton must be imported with its interpreter already on, so this file runs itself in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.in_interpreter import interpreted, run_interpreted, starts_it
from tests.kernels.test_rat_window_attention import STEPS, assert_close, draw, run, steps

# Masked entries may overflow, as on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@starts_it
def test_in_the_interpreter():
    run_interpreted(__file__)


CASES = [
    # T, earlier keys, origin, window, chunk, reach, softcap
    (45, 0, None, 5, 1, None, None),
    (37, 0, [0, 13], 0, 4, None, 2.0),
    (34, 18, [-82, -19], 16, 4, 20, 2.0),
    (40, 0, [40, 3], 0, 16, 20, None),
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_a_softmax_per_token(case):
    T, earlier, origin, window, chunk, reach, softcap = case
    x = draw(3, T, T + earlier, chunk, last=170, groups=1, heads=2)
    where = None if origin is None else torch.tensor(origin)
    options = {"window": window, "chunk_size": chunk, "reach": reach, "softcap": softcap, "origin": where}
    assert_close(run(x, torch.float32, "triton", **options), run(x, torch.float64, "chunked", **options), 1e-5)


@interpreted
@pytest.mark.parametrize("case", STEPS, ids=str)
def test_steps_are_the_whole(case):
    steps(*case, torch.float32, "triton")


@interpreted
def test_the_operator_is_sound():
    """torch's own checks: schema, registration, shapes without data, and tracing."""
    from linearize.kernels.rat_attention import triton_window
    from linearize.kernels.rat_attention.window_places import places

    x = [t.float().requires_grad_() for t in draw(5, 6, 6, 4, last=6, groups=1, heads=2)]
    seen = places(6, 6, 5, 4, None, None, torch.device("cpu"))
    arguments = (*x, seen.first, seen.low, seen.high, seen.width, 0.3, 3.0)
    torch.library.opcheck(triton_window._forward_op, arguments)
