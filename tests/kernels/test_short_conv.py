"""The short convolution: shifted products and steps against a float64 loop and torch's own convolution."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels.short_conv import short_conv, short_conv_step

TOLERANCE = 1e-5
many = settings(max_examples=30, deadline=None, derandomize=True)
few = settings(max_examples=12, deadline=None, derandomize=True)


def draw_inputs(
    seed: int, B: int, T: int, D: int, W: int, bias: bool = True, states: int | None = None
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"x": (B, T, D), "weight": (D, W)}
    if bias:
        shapes["bias"] = (D,)
    if states is not None:
        shapes["initial_state"] = (states, W - 1, D)
    return {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}


def relative_rms(ours: Tensor, reference: Tensor) -> float:
    assert ours.shape == reference.shape
    assert torch.isfinite(ours).all()
    error = (ours.detach().double() - reference.detach().double()).norm()
    size = reference.detach().double().norm()
    return float(error / size) if size > 0 else float(error)


def run(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, **options) -> dict[str, Tensor]:
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    y, state = short_conv(**leaves, output_final_state=True, backend=backend, **options)
    assert state is not None
    generator = torch.Generator().manual_seed(7)
    dy = torch.randn(y.shape, generator=generator).to(dtype)
    dstate = torch.randn(state.shape, generator=generator).to(dtype)
    loss = (y * dy).sum() + (state * dstate).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"y": y, "state": state, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


def assert_close(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    errors = {name: relative_rms(ours[name], reference[name]) for name in reference}
    assert all(error <= tolerance for error in errors.values()), errors


@many
@given(
    seed=st.integers(0, 2**31),
    T=st.sampled_from([0, 1, 2, 3, 4, 17, 65]),
    W=st.sampled_from([1, 2, 4, 5]),
    bias=st.booleans(),
    activation=st.sampled_from([None, "silu"]),
    initial=st.booleans(),
)
def test_shifted_products_are_the_loop(seed, T, W, bias, activation, initial):
    inputs = draw_inputs(seed, 2, T, 6, W, bias, 2 if initial else None)
    reference = run(inputs, torch.float64, "reference", activation=activation)
    assert_close(run(inputs, torch.float32, "chunked", activation=activation), reference)
    assert_close(run(inputs, torch.float64, "chunked", activation=activation), reference, 1e-12)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_against_torch(activation):
    x = draw_inputs(0, 2, 20, 6, 4)
    z = F.conv1d(x["x"].mT, x["weight"][:, None], x["bias"], padding=3, groups=6)[..., :20].mT
    expected = F.silu(z) if activation else z
    for backend in ("chunked", "reference"):
        y, state = short_conv(**x, activation=activation, output_final_state=True, backend=backend)
        assert relative_rms(y, expected) < 1e-12
        assert torch.equal(state, x["x"][:, -3:])


@few
@given(seed=st.integers(0, 2**31), cut=st.integers(0, 20), W=st.sampled_from([1, 2, 4]))
def test_split_in_two_is_the_whole(seed, cut, W):
    x = {name: value.float() for name, value in draw_inputs(seed, 2, 20, 6, W, states=2).items()}
    whole, final = short_conv(**x, activation="silu", output_final_state=True)
    state, parts = x["initial_state"], []
    for here in (slice(0, cut), slice(cut, None)):
        part, state = short_conv(
            x["x"][:, here], x["weight"], x["bias"], "silu", initial_state=state, output_final_state=True
        )
        parts.append(part)
    assert relative_rms(torch.cat(parts, 1), whole) < TOLERANCE
    assert torch.equal(state, final)


@few
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.sampled_from([0, 0, 1, 2, 3, 4, 17, 30]), min_size=1, max_size=6),
    W=st.sampled_from([1, 2, 4]),
    initial=st.booleans(),
)
def test_packed_is_separate(seed, lengths, W, initial):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs = draw_inputs(seed, 1, sum(lengths), 6, W, states=len(lengths) if initial else None)
    ours = run(inputs, torch.float32, "chunked", activation="silu", cu_seqlens=bounds)
    assert_close(ours, run(inputs, torch.float64, "reference", activation="silu", cu_seqlens=bounds))
    for n, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        y, state = short_conv(
            inputs["x"][:, start:end],
            inputs["weight"],
            inputs["bias"],
            "silu",
            initial_state=inputs["initial_state"][n : n + 1] if initial else None,
            output_final_state=True,
        )
        assert relative_rms(ours["y"][:, start:end], y) < TOLERANCE
        assert relative_rms(ours["state"][n : n + 1], state) < TOLERANCE


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_steps_are_the_loop(W, activation):
    x = draw_inputs(1, 2, 9, 6, W, states=2)
    y, final = short_conv(**x, activation=activation, output_final_state=True, backend="reference")
    state = x["initial_state"].float()
    address, steps = state.data_ptr(), []
    for t in range(9):
        token, weight, bias = x["x"][:, t].float(), x["weight"].float(), x["bias"].float()
        steps.append(short_conv_step(token, weight, state, bias, activation))
    assert state.data_ptr() == address
    assert relative_rms(torch.stack(steps, 1), y) < TOLERANCE
    assert torch.equal(state, final.float())


def test_strided_and_half():
    x = draw_inputs(2, 2, 33, 6, 4)
    scattered = {**x, "x": x["x"].mT.contiguous().mT, "weight": x["weight"].T.contiguous().T}
    assert not scattered["x"].is_contiguous()
    assert_close(run(scattered, torch.float32, "chunked"), run(x, torch.float64, "reference"))
    half = {**{name: value.float() for name, value in x.items()}, "x": x["x"].bfloat16()}
    y, state = short_conv(**half, output_final_state=True)
    reference, _ = short_conv(**{name: value.double() for name, value in half.items()}, backend="reference")
    assert y.dtype == state.dtype == torch.bfloat16
    assert relative_rms(y, reference) < torch.finfo(torch.bfloat16).eps
    assert torch.equal(state, half["x"][:, -3:])


BASE = {name: value.float() for name, value in draw_inputs(0, 2, 4, 6, 4).items()}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": torch.zeros(5, 4)}, ValueError, ["weight", "D=6"]),
        ({"weight": torch.zeros(6, 0)}, ValueError, ["weight", "one tap"]),
        ({"bias": torch.zeros(5)}, ValueError, ["bias", "D=6"]),
        ({"activation": "gelu"}, ValueError, ["activation", "gelu", "silu"]),
        ({"initial_state": torch.zeros(2, 4, 6)}, ValueError, ["initial_state", "3"]),
        ({"x": torch.zeros(2, 4, 6, dtype=torch.int64)}, TypeError, ["x", "int64"]),
        ({"bias": torch.zeros(6, device="meta")}, ValueError, ["bias", "meta"]),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, ["batch must be 1"]),
        ({"backend": "triton"}, RuntimeError, ["TRITON_INTERPRET=1"]),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        short_conv(**{**BASE, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
