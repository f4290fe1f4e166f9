"""Fused norm and gate: plain torch by hand, and the Triton kernels against it in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels import rows
from linearize.kernels.dispatch import triton_interpreted
from linearize.kernels.norm_gate import norm_gate
from tests.kernels.test_gated_scan import TOLERANCE, assert_close, interpreted, many, relative_rms, run_interpreted

FORMS = [(order, activation) for order in ("norm_then_gate", "gate_then_norm") for activation in ("swish", "sigmoid")]


def draw_inputs(seed: int, *shape: int, weight: str = "", gate: bool = True, size: float = 1.0) -> dict[str, Tensor]:
    """Float64 inputs that float16 holds exactly. weight: "" none, "row" [V], "head" [H,V]."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {"x": torch.randn(shape, generator=generator) * size}
    if weight:
        inputs["weight"] = torch.randn(shape[-1:] if weight == "row" else shape[-2:], generator=generator)
    if gate:
        inputs["gate"] = 3 * torch.randn(shape, generator=generator)
    return {name: x.half().double() for name, x in inputs.items()}


def run(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, **options) -> dict[str, Tensor]:
    """The output and all gradients under a random output gradient."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    y = norm_gate(**leaves, backend=backend, **options)
    assert y.dtype == dtype
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).half().to(dtype)
    gradients = torch.autograd.grad((y * dy).sum(), list(leaves.values()))
    return {"y": y} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


@many
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(0, 4), (1, 1), (7, 16), (2, 5, 3, 16), (3, 0, 2, 4)]),
    weight=st.sampled_from(["", "row", "head"]),
    gate=st.booleans(),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    form=st.sampled_from(FORMS),
)
def test_formula(seed, shape, weight, gate, size, form):
    """Against torch's own RMSNorm, sigmoid and SiLU, differentiated in float64."""
    weight = weight if len(shape) == 4 or weight != "head" else "row"
    inputs = draw_inputs(seed, *shape, weight=weight, gate=gate, size=size)
    order, activation = form
    found = run(inputs, torch.float32, "chunked", order=order, activation=activation)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    factor = 1.0
    if gate:
        factor = (F.silu if activation == "swish" else torch.sigmoid)(leaves["gate"])
    first = order == "gate_then_norm"
    y = F.rms_norm(leaves["x"] * factor if first else leaves["x"], shape[-1:], eps=1e-5) * leaves.get("weight", 1.0)
    y = y if first else y * factor
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).half().double()
    expected = {"y": y}
    gradients = torch.autograd.grad((y * dy).sum(), list(leaves.values()))
    expected |= {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    if shape[-1] == 1:  # a row of one is its sign: gradients are what eps leaves of them
        found, expected = ({"y": results["y"]} for results in (found, expected))
    assert_close(found, expected)


def test_by_hand():
    x, g = torch.tensor([[3.0, -4.0]]), torch.tensor([[0.5, -1.0]])
    for order, activation in FORMS:
        opened = [1 / (1 + math.exp(-float(v))) * (float(v) if activation == "swish" else 1) for v in g[0]]
        inner = [3 * opened[0], -4 * opened[1]] if order == "gate_then_norm" else [3.0, -4.0]
        root = math.sqrt((inner[0] ** 2 + inner[1] ** 2) / 2 + 0.1)
        after = [1.0, 1.0] if order == "gate_then_norm" else opened
        expected = [2 * inner[0] / root * after[0], -inner[1] / root * after[1]]
        y = norm_gate(x, torch.tensor([2.0, -1.0]), g, order=order, activation=activation, eps=0.1)
        assert y[0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": torch.ones(7)}, ValueError, ["weight", "8"]),
        ({"weight": torch.ones(2, 8)}, ValueError, ["weight", "3"]),
        ({"gate": torch.ones(2, 4, 8)}, ValueError, ["gate"]),
        ({"x": torch.zeros(2, 4, 3, 8, dtype=torch.int32)}, TypeError, ["x", "int32"]),
        ({"order": "after"}, ValueError, ["order", "after", "gate_then_norm"]),
        ({"activation": "tanh"}, ValueError, ["activation", "tanh", "sigmoid"]),
        ({"backend": "fast"}, ValueError, ["backend", "fast"]),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        norm_gate(**{"x": torch.zeros(2, 4, 3, 8), **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@interpreted
@pytest.mark.parametrize(
    ("shape", "weight", "gate", "form"),
    [
        ((1, 2), "row", True, FORMS[0]),
        ((2, 7, 3, 20), "head", True, FORMS[0]),
        ((2, 7, 3, 20), "", True, FORMS[1]),
        ((9, 130), "row", True, FORMS[2]),
        ((2, 7, 3, 20), "head", True, FORMS[3]),
        ((5, 20), "row", False, FORMS[3]),
    ],
)
def test_interpreted_kernels_are_the_formula(shape, weight, gate, form, monkeypatch):
    monkeypatch.setattr(rows, "_PROGRAMS", 3)  # several tiles a program, the last ones empty
    monkeypatch.setattr(rows, "_ELEMENTS", 128)
    inputs = draw_inputs(0, *shape, weight=weight, gate=gate)
    options = {"order": form[0], "activation": form[1]}
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float32, "triton", **options), reference)
    if weight == "head":
        assert_close(run(inputs, torch.float16, "triton", **options), reference, 2e-3)


@interpreted
def test_interpreted_operator_is_sound():
    """Strided and mixed inputs, extreme gates, torch's own checks, tracing."""
    from linearize.kernels.norm_gate import triton_op

    inputs = draw_inputs(1, 2, 3, 2, 8, weight="row")
    inputs["gate"][0] *= 100
    x = {name: value.float().requires_grad_() for name, value in inputs.items()}
    x["x"] = inputs["x"].float().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    x["gate"] = torch.cat([inputs["gate"]] * 2, -1).float()[..., :8].detach().requires_grad_()
    assert not x["x"].is_contiguous()
    assert not x["gate"].is_contiguous()
    results = []
    for backend in ("triton", "chunked"):
        y = norm_gate(**x, backend=backend)
        results.append([y, *torch.autograd.grad(y.sum(), list(x.values()))])  # an expanded gradient
    assert all(relative_rms(a, b) < TOLERANCE for a, b in zip(*results, strict=True))
    mixed = norm_gate(x["x"].half(), x["weight"], x["gate"], backend="triton")
    assert mixed.dtype == torch.float16
    assert relative_rms(mixed, results[1][0]) < 1e-3
    flat = [value.detach().clone().requires_grad_() for value in (x["x"].flatten(0, 1), x["gate"].flatten(0, 1))]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for gain in (None, torch.ones(2, 8)):
        torch.library.opcheck(triton_op._op, (flat[0], gain, flat[1], True, True, 1e-5), test_utils=checks)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: norm_gate(*t, backend="triton"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*x.values()), norm_gate(*x.values(), backend="triton"))
    with pytest.raises(RuntimeError, match="float64"):
        norm_gate(inputs["x"], backend="triton")
    with pytest.raises(RuntimeError, match="16384"):
        norm_gate(torch.zeros(1, 20000), backend="triton")


@pytest.mark.skipif(triton_interpreted(), reason="already there")
def test_triton_kernels_in_the_interpreter():
    run_interpreted(__file__)
