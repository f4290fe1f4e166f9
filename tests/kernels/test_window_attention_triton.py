"""Window attention's Triton kernels in Triton's CPU interpreter.

Triton must be imported with its interpreter already on, so this file runs itself in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linearize.kernels.window_attention import window_attention
from tests.kernels.in_interpreter import interpreted, run_interpreted, starts_it
from tests.kernels.test_window_attention import STEPS, assert_close, decode, draw_inputs, relative_rms, run

# Masked entries may overflow, as on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@starts_it
def test_in_the_interpreter():
    run_interpreted(__file__)


def compare(inputs: dict[str, Tensor], **options) -> None:
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float32, "triton", **options), reference)


@interpreted
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    B=st.integers(1, 2),
    T=st.sampled_from([1, 33, 50, 70]),
    earlier=st.sampled_from([0, 0, 1, 30]),
    heads=st.sampled_from([(1, 1, 1), (2, 1, 1), (2, 1, 2), (6, 2, 3), (3, 1, 1)]),
    window=st.sampled_from([1, 8, 33, 40, 1000]),
    sinks=st.sampled_from([0, 0, 4, 300]),
    softcap=st.sampled_from([None, None, 2.0]),
    padding=st.sampled_from([None, None, "left", "random"]),
)
def test_kernels_are_the_dense_softmax(seed, B, T, earlier, heads, window, sinks, softcap, padding):
    S = T + earlier
    key_mask = None
    if padding == "left":
        key_mask = torch.arange(S) >= torch.arange(B)[:, None] * (S // 2)
    elif padding == "random":
        key_mask = torch.rand(B, S, generator=torch.Generator().manual_seed(seed)) < 0.6
    inputs = draw_inputs(seed, B, T, S, *heads)
    compare(inputs, window=window, sinks=sinks, softcap=softcap, key_mask=key_mask)


@interpreted
@pytest.mark.parametrize(("K", "V"), [(60, 100), (100, 60), (16, 256)])
def test_widths(K, V):
    compare(draw_inputs(1, 1, 40, 40, 2, 1, 1, K, V), window=20)


@interpreted
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("window", [9, 1000])
def test_packed(window, sinks):
    bounds = torch.tensor([0, 0, 3, 70, 70, 71, 110, 110])
    compare(draw_inputs(2, 1, 110, 110, 2, 1, 1), window=window, sinks=sinks, cu_seqlens=bounds)


@interpreted
def test_float16():
    half = {name: x.half() for name, x in draw_inputs(3, 1, 130, 130, 2, 1, 1, 32, 32).items()}
    wide = {name: x.double() for name, x in half.items()}
    ours = run(half, torch.float16, "triton", window=50, sinks=2)
    assert_close(ours, run(wide, torch.float64, "reference", window=50, sinks=2), 2e-3)


@interpreted
def test_strided_inputs_and_an_expanded_gradient():
    x = draw_inputs(4, 1, 40, 40, 4, 2, 2)
    compare({name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in x.items()}, window=16)
    compare({name: t.mT.contiguous().mT for name, t in x.items()}, window=16)
    gradients = []
    for backend in ("triton", "chunked"):
        leaves = {name: t.float().requires_grad_() for name, t in x.items()}
        o = window_attention(**leaves, window=16, backend=backend)
        assert isinstance(o, Tensor)
        gradients.append(torch.autograd.grad(o.sum(), list(leaves.values())))
    for ours, expected in zip(*gradients, strict=True):
        assert relative_rms(ours, expected) < 1e-5


@interpreted
@pytest.mark.parametrize("case", STEPS, ids=str)
def test_steps_are_the_whole(case):
    heads, window, sinks, spare, softcap = case
    x = {name: value.float() for name, value in draw_inputs(7, 2, 14, 14, *heads).items()}
    key_mask = torch.arange(14) >= torch.tensor([[0], [4]])
    options = {"window": window, "sinks": sinks, "softcap": softcap}
    for mask, prompt in ((None, 5), (key_mask, 3)):
        found = decode(x, prompt, window + sinks + spare, "triton", mask, **options)
        for ours, expected in zip(
            found, decode(x, prompt, window + sinks + spare, "chunked", mask, **options), strict=True
        ):
            assert relative_rms(ours, expected) < 1e-5


@interpreted
def test_what_has_no_kernel_says_so():
    x = {name: value.float() for name, value in draw_inputs(0, 1, 4, 4, 1, 1, 1, 300, 16).items()}
    with pytest.raises(RuntimeError, match="256 wide, not 300"):
        window_attention(**x, window=2, backend="triton")
    with pytest.raises(RuntimeError, match="float64"):
        window_attention(**draw_inputs(0, 1, 4, 4, 1, 1, 1), window=2, backend="triton")


@interpreted
def test_the_operator_is_sound():
    """torch's own checks: schema, registration, shapes without data, and tracing."""
    from linearize.kernels.window_attention import triton_op

    q, k, v = (x.float().requires_grad_() for x in draw_inputs(5, 1, 40, 40, 2, 1, 1).values())
    torch.library.opcheck(triton_op._forward_op, (q, k, v, 0.25, 8, 2, 3.0, torch.arange(40)[None] > 5, None))


@interpreted
def test_torch_compile_autocast_and_checkpointing():
    x = [t.float().requires_grad_() for t in draw_inputs(6, 1, 40, 40, 2, 1, 1).values()]

    def loss(*inputs: Tensor) -> Tensor:
        o, lse = window_attention(*inputs, window=8, return_lse=True, backend="triton")
        return o.square().sum() + lse.square().sum()

    expected = torch.autograd.grad(loss(*x), x)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for other in (compiled(*x), checkpoint(loss, *x, use_reentrant=False)):
        for ours, wanted in zip(torch.autograd.grad(other, x), expected, strict=True):
            assert torch.equal(ours, wanted)
    with torch.autocast("cpu", torch.float16):
        o = window_attention(*x, window=8, backend="triton")
    whole = window_attention(*x, window=8)
    assert isinstance(o, Tensor) and isinstance(whole, Tensor)
    assert 1e-6 < (o - whole).norm() / whole.norm() < 2e-3


@interpreted
def test_torch_compile_step():
    x = {name: F.pad(t.float(), (0, 0, 0, 0, 0, 1)) for name, t in draw_inputs(9, 2, 5, 5, 2, 1, 1).items()}
    eager = decode(x, 3, 4, "triton", window=4)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: decode(x, 3, 4, "triton", window=4)[0], backend="aot_eager")
    assert torch.equal(eager[0], compiled())
