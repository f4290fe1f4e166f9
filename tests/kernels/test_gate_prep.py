"""Gate preparation: plain torch and the Triton kernels against the float64 formulas."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels import rows
from linearize.kernels.dispatch import triton_interpreted
from linearize.kernels.gate_prep import ddts_gates, softplus_gate
from tests.kernels.test_gated_scan import TOLERANCE, interpreted, many, relative_rms, run_interpreted

OPERATIONS = {
    "ddts": ddts_gates,
    "ddts, silu": functools.partial(ddts_gates, activation="silu"),
    "softplus": softplus_gate,
}


def assert_close(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Relative RMS errors; what is all near float32's underflow may be zero."""
    for name, expected in reference.items():
        assert torch.isfinite(ours[name]).all(), name
        error = (ours[name].detach().double() - expected.detach()).norm()
        assert error <= tolerance * expected.detach().norm() + 1e-30, (name, error, expected.norm())


def draw_ddts(seed: int, *shape: int, size: float = 1.0, biases: str = "ab") -> dict[str, Tensor]:
    """Float64 inputs that float16 holds exactly, projections of the given size."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (size * torch.randn(*shape, generator=generator)).half().double()

    inputs = {"a": normal(*shape, size=size), "b": normal(*shape, size=size), "k": normal(*shape)}
    return inputs | {f"{name}_bias": normal(*shape[2:]) for name in biases}


def draw_softplus(
    seed: int, *shape: int, size: float = 1.0, bias: bool = True, wide: bool = False
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inner = shape[2:] if wide else shape[2:3]
    inputs = {"x": (size * torch.randn(*shape, generator=generator)), "A_log": torch.randn(inner, generator=generator)}
    if bias:
        inputs["bias"] = torch.randn(inner, generator=generator)
    return {name: x.half().double() for name, x in inputs.items()}


def run(operation: str, inputs: dict[str, Tensor], dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Both outputs and all gradients under random output gradients. Parameters stay wide in 16 bits."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {name: x.to(dtype if name in "abkx" else wide).requires_grad_() for name, x in inputs.items()}
    outputs = OPERATIONS[operation](**leaves, backend=backend)
    assert outputs[0].dtype == wide
    assert outputs[1].dtype == (wide if operation == "softplus" else dtype)
    generator = torch.Generator().manual_seed(7)
    loss = sum((o * torch.randn(o.shape, generator=generator).half().to(o.dtype)).sum() for o in outputs)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    assert all(g.dtype == x.dtype for g, x in zip(gradients, leaves.values(), strict=True))
    return {"decay": outputs[0], "second": outputs[1]} | dict(zip(leaves, gradients, strict=True))


@many
@given(
    seed=st.integers(0, 2**31),
    T=st.sampled_from([0, 1, 5, 33]),
    K=st.sampled_from([1, 5, 16]),
    size=st.sampled_from([0.1, 1.0, 10.0, 100.0]),
    biases=st.sampled_from(["", "a", "b", "ab"]),
    operation=st.sampled_from(["ddts", "ddts, silu"]),
)
def test_ddts_is_the_formula(seed, T, K, size, biases, operation):
    inputs = draw_ddts(seed, 2, T, 3, K, size=size, biases=biases)
    reference = run(operation, inputs, torch.float64, "reference")
    found = run(operation, inputs, torch.float32, "chunked")
    double = run(operation, inputs, torch.float64, "chunked")
    if K == 1:  # a key of one channel is its sign: its gradient is zero, and all there is is rounding
        del reference["k"]
    assert_close(found, reference)
    assert_close(double, reference, 2e-7)  # softplus(a) is taken for e^a below a = -15


@many
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(2, 0, 3), (1, 1, 1), (2, 17, 3), (2, 17, 3, 5)]),
    size=st.sampled_from([0.1, 1.0, 10.0, 100.0]),
    bias=st.booleans(),
    wide=st.booleans(),
)
@example(seed=0, shape=(2, 17, 3, 5), size=10.0, bias=True, wide=True)
def test_softplus_gate_is_the_formula(seed, shape, size, bias, wide):
    inputs = draw_softplus(seed, *shape, size=size, bias=bias, wide=wide)
    reference = run("softplus", inputs, torch.float64, "reference")
    assert_close(run("softplus", inputs, torch.float32, "chunked"), reference)


def by_hand(backend: str) -> None:
    """Projections far beyond softplus's underflow and float32's exponents, one number at a time."""
    for a, b in [(-100.0, 0.5), (-100.0, -100.0), (-100.0, 100.0), (-20.0, -3.0), (100.0, 0.5), (100.0, 100.0)]:
        x = {"a": torch.full((1, 1, 1, 2), a), "b": torch.full((1, 1, 1, 2), b), "k": torch.tensor([[[[3.0, -4.0]]]])}
        leaves = {name: value.requires_grad_() for name, value in x.items()}
        decay, key = ddts_gates(**leaves, backend=backend)
        rate = math.log1p(math.exp(-abs(a))) + max(a, 0)
        temperature = 1 / (1 + math.exp(-b))
        gate = math.exp(temperature * math.log(rate))
        tiny = 1e-38  # below it float32 may be zero
        assert decay.flatten().tolist() == pytest.approx([-rate * temperature] * 2, rel=1e-5, abs=tiny)
        assert key.flatten().tolist() == pytest.approx([0.6 * gate, -0.8 * gate], rel=2e-5, abs=tiny)
        da, db, dk = torch.autograd.grad(key[..., 0].sum() + 0 * decay.sum(), list(leaves.values()))
        rise = 1 / (1 + math.exp(-a))
        assert float(da[..., 0]) == pytest.approx(0.6 * gate * temperature * rise / rate, rel=2e-5, abs=tiny)
        slope = temperature / (1 + math.exp(b))
        assert float(db[..., 0]) == pytest.approx(0.6 * gate * math.log(rate) * slope, rel=2e-5, abs=tiny)
        assert dk.flatten().tolist() == pytest.approx([gate * 0.64 / 5, gate * 0.48 / 5], rel=2e-5, abs=tiny)


def test_extreme_projections_by_hand():
    by_hand("chunked")


def short_keys(backend: str) -> None:
    """A zero key, and keys shorter and longer than eps."""
    inputs = draw_ddts(0, 1, 3, 1, 4)
    inputs["k"] *= torch.tensor([0.0, 1e-3, 1.0]).double().view(1, 3, 1, 1)
    leaves = {name: x.float().requires_grad_() for name, x in inputs.items()}
    wide = {name: x.requires_grad_() for name, x in inputs.items()}
    outputs = (ddts_gates(**leaves, eps=1e-2, backend=backend), ddts_gates(**wide, eps=1e-2, backend="reference"))
    ours, expected = (
        torch.autograd.grad(o[1][..., :2].sum(), x["k"]) for o, x in zip(outputs, (leaves, wide), strict=True)
    )
    assert relative_rms(outputs[0][1], outputs[1][1]) < TOLERANCE
    for t in range(3):
        assert relative_rms(ours[0][:, t], expected[0][:, t]) < TOLERANCE


def test_short_keys():
    short_keys("chunked")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"b": torch.zeros(1, 4, 2, 7)}, ValueError, ["b", "K=8"]),
        ({"a": torch.zeros(1, 4, 2, 8, dtype=torch.int64)}, TypeError, ["a", "int64"]),
        ({"a_bias": torch.zeros(8)}, ValueError, ["a_bias", "[H, K]"]),
        ({"backend": "fast"}, ValueError, ["backend", "fast"]),
        ({"activation": "gelu"}, ValueError, ["activation", "gelu"]),
    ],
)
def test_bad_ddts_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        ddts_gates(**{**dict.fromkeys("abk", torch.zeros(1, 4, 2, 8)), **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"A_log": torch.zeros(3)}, ["A_log", "H=2"]), ({"bias": torch.zeros(2, 7)}, ["bias", "K=8"])],
)
def test_bad_softplus_arguments_are_named(change, words):
    with pytest.raises(ValueError) as caught:
        softplus_gate(**{"x": torch.zeros(1, 4, 2, 8), "A_log": torch.zeros(2), **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@interpreted
@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("operation", ["ddts", "ddts, silu"])
@pytest.mark.parametrize(("T", "H", "K", "biases"), [(1, 1, 1, "ab"), (7, 3, 20, "a"), (9, 1, 20, "b")])
def test_interpreted_ddts_is_the_formula(T, H, K, biases, operation, size, monkeypatch):
    monkeypatch.setattr(rows, "_PROGRAMS", 3)  # several tiles a program, the last ones empty
    monkeypatch.setattr(rows, "_ELEMENTS", 128)
    inputs = draw_ddts(0, 2, T, H, K, size=size, biases=biases)
    reference = run(operation, inputs, torch.float64, "reference")
    found = run(operation, inputs, torch.float32, "triton")
    assert_close({**found, "k": reference["k"]} if K == 1 else found, reference)
    assert_close(run(operation, inputs, torch.float16, "triton"), reference, 2e-3) if K > 1 and size == 1 else None


@interpreted
@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize(
    ("shape", "wide", "bias"), [((1, 1, 1), False, True), ((2, 37, 3), False, False), ((2, 9, 3, 60), True, True)]
)
def test_interpreted_softplus_gate_is_the_formula(shape, wide, bias, size, monkeypatch):
    monkeypatch.setattr(rows, "_PROGRAMS", 4)
    monkeypatch.setattr(rows, "_ELEMENTS", 1024)
    inputs = draw_softplus(0, *shape, size=size, bias=bias, wide=wide)
    reference = run("softplus", inputs, torch.float64, "reference")
    assert_close(run("softplus", inputs, torch.float32, "triton"), reference)
    assert_close(run("softplus", inputs, torch.float16, "triton"), reference, 2e-3)


@interpreted
def test_interpreted_extremes():
    by_hand("triton")
    short_keys("triton")


@interpreted
def test_interpreted_operators_are_sound():
    """Strided inputs, one output used alone, torch's own checks, and tracing."""
    from linearize.kernels.gate_prep import triton_op

    inputs = draw_ddts(1, 2, 3, 2, 8)
    both = torch.stack([inputs["a"], inputs["b"]], 3).float()
    inputs["k"] = inputs["k"].transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [both[..., 0, :], both[..., 1, :], inputs["k"].float()]
    leaves = [x.detach().requires_grad_() for x in leaves]
    assert not any(x.is_contiguous() for x in leaves)
    for part in (0, 1):
        ours, expected = (
            torch.autograd.grad(
                ddts_gates(*x, backend=backend)[part].sum(), x, allow_unused=True, materialize_grads=True
            )
            for x, backend in ((leaves, "triton"), (leaves, "chunked"))
        )
        assert all(relative_rms(a, b) < TOLERANCE or not b.any() for a, b in zip(ours, expected, strict=True))
        x = {name: value.float().requires_grad_() for name, value in draw_softplus(2, 2, 3, 2, 8).items()}
        ours, expected = (
            torch.autograd.grad(
                softplus_gate(**x, backend=backend)[part].sum(),
                list(x.values()),
                allow_unused=True,
                materialize_grads=True,
            )
            for backend in ("triton", "chunked")
        )
        assert all(relative_rms(a, b) < TOLERANCE for a, b in zip(ours, expected, strict=True))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in leaves]
    torch.library.opcheck(triton_op._ddts_op, (*flat, None, torch.zeros(2, 8), True, 1e-12), test_utils=checks)
    torch.library.opcheck(triton_op._softplus_op, (flat[0][:, 0], torch.zeros(8), torch.zeros(8)), test_utils=checks)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: ddts_gates(*t, backend="triton")[1], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*leaves), ddts_gates(*leaves, backend="triton")[1])
    for operation, call in (("ddts", draw_ddts(0, 1, 2, 1, 4)), ("softplus", draw_softplus(0, 1, 2, 1))):
        with pytest.raises(RuntimeError, match="float64"):
            OPERATIONS[operation](**call, backend="triton")


@pytest.mark.skipif(triton_interpreted(), reason="already there")
def test_triton_kernels_in_the_interpreter():
    run_interpreted(__file__)
