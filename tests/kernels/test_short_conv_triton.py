"""The short convolution's Triton kernels in Triton's CPU interpreter.

Triton must be imported with its interpreter already on, so this file runs itself in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linearize.kernels.short_conv import short_conv, short_conv_step
from tests.kernels.in_interpreter import interpreted, run_interpreted, starts_it
from tests.kernels.test_short_conv import assert_close, draw_inputs, relative_rms, run

# Masked entries may overflow, as on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@starts_it
def test_in_the_interpreter():
    run_interpreted(__file__)


def compare(inputs: dict[str, Tensor], **options) -> None:
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float32, "triton", **options), reference)


CASES = [
    # T, D, W, bias, activation, initial state
    (1, 6, 1, True, "silu", False),
    (3, 6, 2, False, None, True),
    (33, 6, 4, True, "silu", True),
    (2, 70, 4, True, "silu", True),
    (35, 6, 3, False, "silu", False),
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_loop(case):
    T, D, W, bias, activation, initial = case
    compare(draw_inputs(0, 2, T, D, W, bias, 2 if initial else None), activation=activation)


@interpreted
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("W", [1, 3])
def test_packed(W, initial):
    bounds = torch.tensor([0, 0, 1, 3, 30, 30, 32, 45, 45])
    compare(draw_inputs(1, 1, 45, 6, W, states=8 if initial else None), activation="silu", cu_seqlens=bounds)


@interpreted
def test_a_program_with_many_tiles():
    compare(draw_inputs(2, 1, 260, 6, 2), activation="silu")


@interpreted
@pytest.mark.parametrize("activation", [None, "silu"])
def test_an_input_without_gradient_changes_no_other(activation):
    inputs = draw_inputs(4, 2, 37, 6, 4)
    dy = torch.randn(2, 37, 6)
    found = []
    for trains in (True, False):
        leaves = {name: x.float().requires_grad_(trains or name != "x") for name, x in inputs.items()}
        (short_conv(**leaves, activation=activation, backend="triton")[0] * dy).sum().backward()
        assert (leaves["x"].grad is not None) == trains
        found.append([leaves[name].grad for name in ("weight", "bias")])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs) and ours.any()


@interpreted
def test_strided_and_half():
    x = draw_inputs(3, 2, 9, 6, 3, states=2)
    strided = {
        "x": x["x"].mT.contiguous().mT,
        "weight": x["weight"].T.contiguous().T,
        "bias": x["bias"],
        "initial_state": x["initial_state"].mT.contiguous().mT,
    }
    compare(strided, activation="silu")
    half = {name: value.half() for name, value in x.items()}
    ours = run(half, torch.float16, "triton", activation="silu")
    reference = run({name: v.double() for name, v in half.items()}, torch.float64, "reference", activation="silu")
    assert ours["y"].dtype == ours["dx"].dtype == torch.float16
    assert_close(ours, reference, 1e-3)


@interpreted
@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_steps(W, activation):
    x = {name: value.float() for name, value in draw_inputs(4, 2, 9, 6, W, states=2).items()}
    y, final = short_conv(**x, activation=activation, output_final_state=True)
    state = x["initial_state"].mT.contiguous().mT
    address = state.data_ptr()
    steps = [
        short_conv_step(x["x"][:, t], x["weight"], state, x["bias"], activation, backend="triton") for t in range(9)
    ]
    assert state.data_ptr() == address
    assert relative_rms(torch.stack(steps, 1), y) < 1e-5
    assert torch.equal(state, final)


@interpreted
def test_what_has_no_kernel_says_so():
    x = draw_inputs(0, 1, 4, 6, 4)
    with pytest.raises(RuntimeError, match="float64"):
        short_conv(**x, backend="triton")
    with pytest.raises(RuntimeError, match="W=16 taps, not 17"):
        short_conv(x["x"].float(), torch.zeros(6, 17), backend="triton")


@interpreted
def test_the_operators_are_sound():
    """torch's own checks: schema, registration, shapes without data, and tracing."""
    from linearize.kernels.short_conv import triton_decode, triton_op

    x, w, bias, start = (t.float().requires_grad_() for t in draw_inputs(5, 1, 9, 6, 4, states=1).values())
    torch.library.opcheck(triton_op._forward_op, (x, w, bias, start, True, None))
    token, w, bias, start = (t.detach() for t in (x[:, 0], w, bias, start))
    torch.library.opcheck(triton_decode._step_op, (token, w, start, bias, True))


@interpreted
def test_torch_compile_and_checkpointing():
    x = [t.float().requires_grad_() for t in draw_inputs(6, 1, 9, 6, 4).values()]

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return short_conv(x, weight, bias, "silu", backend="triton")[0].square().sum()

    expected = torch.autograd.grad(loss(*x), x)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for other in (compiled(*x), checkpoint(loss, *x, use_reentrant=False)):
        for ours, wanted in zip(torch.autograd.grad(other, x), expected, strict=True):
            assert torch.equal(ours, wanted)
