"""The Triton path of the window beside linear attention in Triton's CPU interpreter.

Triton must be imported with its interpreter already on, so this file runs itself in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linearize.kernels.window_linear_attention import window_linear_attention
from tests.kernels.in_interpreter import interpreted, run_interpreted, starts_it
from tests.kernels.test_window_linear_attention import assert_close, decode, draw_inputs, relative_rms, run

# Masked entries may overflow, as on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@starts_it
def test_in_the_interpreter():
    run_interpreted(__file__)


PADDED = torch.arange(40) >= torch.tensor([[0], [13]])
CASES = [
    # T, earlier keys, heads of q, k, v and phi_k, state, options
    (40, 0, (4, 2, 2, 4), False, {"window": 8}),
    (33, 0, (2, 2, 1, 1), False, {"window": 8, "shift": "none", "softcap": 2.0}),
    (5, 0, (2, 1, 1, 2), False, {"window": 8, "shift": "none"}),
    (30, 10, (2, 1, 2, 1), True, {"window": 10, "key_mask": PADDED}),
    (30, 6, (2, 1, 2, 1), False, {"window": 10}),
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_kernels_are_the_loop(case):
    T, earlier, heads, state, options = case
    inputs = draw_inputs(0, 2, T, earlier, heads, state=state)
    assert_close(run(inputs, torch.float32, "triton", **options), run(inputs, torch.float64, "reference", **options))


@interpreted
@pytest.mark.parametrize("shift", ["window", "none"])
def test_packed(shift):
    options = {"window": 6, "shift": shift, "cu_seqlens": torch.tensor([0, 0, 3, 26, 32, 39, 45, 45])}
    inputs = draw_inputs(1, 1, 45, 0, (2, 1, 1, 2))
    assert_close(run(inputs, torch.float32, "triton", **options), run(inputs, torch.float64, "reference", **options))


@interpreted
def test_float16():
    half = {name: x.half() for name, x in draw_inputs(2, 1, 70, 0, (2, 1, 1, 2)).items()}
    reference = run({name: x.double() for name, x in half.items()}, torch.float64, "reference", window=8)
    assert_close(run(half, torch.float16, "triton", window=8), reference, 2e-3)


@interpreted
def test_exponents_out_of_range_have_no_gradient():
    inputs = draw_inputs(3, 1, 20, 0, (2, 1, 1, 2))
    inputs["mix"] = torch.tensor([-90.0, 90.0]).double()
    ours = run(inputs, torch.float32, "triton", window=4)
    assert (ours["dmix"] == 0).all()
    del ours["dmix"]
    reference = run(inputs, torch.float64, "reference", window=4)
    assert_close(ours, {name: reference[name] for name in ours})


@interpreted
@pytest.mark.parametrize(("window", "shift"), [(1, "window"), (5, "none")])
def test_steps(window, shift):
    x = {name: value.float() for name, value in draw_inputs(4, 2, 13, 0, (4, 2, 2, 4)).items()}
    key_mask = torch.arange(13) >= torch.tensor([[0], [4]])
    for mask, prompt in ((None, 7), (key_mask, 3)):
        found = decode(x, prompt, window, "triton", mask, shift=shift)
        for ours, expected in zip(found, decode(x, prompt, window, "chunked", mask, shift=shift), strict=True):
            assert relative_rms(ours, expected) < 1e-5


@interpreted
def test_the_operators_are_sound():
    """torch's own checks: schema, registration, shapes without data, and tracing."""
    from linearize.kernels.window_linear_attention import triton_join

    def leaf(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()

    inputs = (leaf(1, 6, 2, 16), leaf(1, 6, 2), leaf(1, 9, 2, 16), leaf(1, 9, 2), leaf(2), None, 3, False)
    torch.library.opcheck(triton_join._forward_op, inputs)


@interpreted
def test_torch_compile():
    x = {name: t.float().requires_grad_() for name, t in draw_inputs(5, 1, 20, 0, (2, 1, 1, 2)).items()}

    def loss(**inputs: Tensor) -> Tensor:
        return window_linear_attention(**inputs, window=4, shift="none", backend="triton")[0].square().sum()

    leaves = list(x.values())
    expected = torch.autograd.grad(loss(**x), leaves)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, wanted in zip(torch.autograd.grad(compiled(**x), leaves), expected, strict=True):
        assert relative_rms(ours, wanted) < 1e-6
