"""Losses from hidden states and heads: chunks and the Triton kernel against whole float64 logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linearize.kernels.dispatch import triton_interpreted
from linearize.kernels.linear_loss import chunked, linear_cross_entropy, linear_kl, operator
from linearize.kernels.linear_loss.terms import Terms
from tests.kernels.test_gated_scan import TOLERANCE, assert_close, interpreted, many, relative_rms, run_interpreted

# Masked entries subtract infinities, as on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def draw_inputs(seed: int, N: int, D: int, V: int, *, bias: bool = True, size: float = 1.0) -> dict[str, Tensor]:
    """Float64 inputs that float16 holds exactly; a teacher of another width."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (size * torch.randn(*shape, generator=generator)).half().double()

    inputs = {"hidden": normal(N, D), "weight": normal(V, D)}
    inputs |= {"teacher_hidden": normal(N, D + 3), "teacher_weight": normal(V, D + 3)}
    if bias:
        inputs |= {"bias": normal(V), "teacher_bias": normal(V)}
    return inputs


def draw_labels(seed: int, N: int, V: int, ignored: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (N,), generator=generator)
    return labels.masked_fill(torch.rand(N, generator=generator) < ignored, -100)


def run(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, **options) -> dict[str, Tensor]:
    """All results, and the gradients of what trains under a gradient of 3."""
    leaves = {name: x.to(dtype) for name, x in inputs.items()}
    trained = {name: leaves[name].requires_grad_() for name in ("hidden", "weight", "bias") if name in leaves}
    result = linear_kl(**leaves, backend=backend, **options)._asdict()
    gradients = torch.autograd.grad(3 * result["loss"], list(trained.values()))
    assert all(g.dtype == dtype for g in gradients)
    return result | {f"d{name}": g for name, g in zip(trained, gradients, strict=True)}


@many
@given(
    seed=st.integers(0, 2**31),
    N=st.sampled_from([0, 1, 2, 7, 16, 33]),
    V=st.sampled_from([1, 2, 16, 50, 130]),
    chunk_size=st.sampled_from([None, 1, 5, 16]),
    ignored=st.sampled_from([None, 0.0, 0.3, 1.0]),
    weights=st.sampled_from([(0.0, 1.0), (0.3, 0.7), (1.0, 0.0), (0.0, 0.0)]),
    direction=st.sampled_from(["forward", "reverse"]),
    temperature=st.sampled_from([1.0, 1.0, 0.5, 3.0]),
    head=st.sampled_from([(None, 1.0), (None, 0.25), (4.0, 1.0), (4.0, 0.25)]),
    bias=st.booleans(),
)
def test_chunks_are_the_formula(seed, N, V, chunk_size, ignored, weights, direction, temperature, head, bias):
    inputs = draw_inputs(seed, N, 9, V, bias=bias)
    options = {"direction": direction, "temperature": temperature, "softcap": head[0], "logit_scale": head[1]}
    options |= {"ce_weight": weights[0] if ignored is not None else 0.0, "kl_weight": weights[1]}
    if ignored is not None:
        options["labels"] = draw_labels(seed, N, V, ignored)
    reference = run(inputs, torch.float64, "reference", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "_SLICE_ELEMENTS", 200)
        ours = run(inputs, torch.float64, "chunked", chunk_size=chunk_size, **options)
        single = run(inputs, torch.float32, "chunked", chunk_size=chunk_size, **options)
    assert_close(ours, reference, 1e-11)
    # With one entry the divergence is zero, and all there is is rounding.
    assert_close(single, reference) if V > 2 else None


def test_against_the_definitions_by_hand():
    """Sums over tokens and entries, one by one, in Python; ignored tokens count nowhere."""
    inputs = draw_inputs(0, 5, 3, 6)
    labels = torch.tensor([2, -100, 0, 5, -100])
    z = 0.5 * (inputs["hidden"] @ inputs["weight"].T + inputs["bias"])
    y = 0.5 * (inputs["teacher_hidden"] @ inputs["teacher_weight"].T + inputs["teacher_bias"])
    ce = forward = reverse = 0.0
    for i in (0, 2, 3):
        q, p = ([float(e) for e in (x[i] / 2).exp() / (x[i] / 2).exp().sum()] for x in (z, y))
        forward += sum(b * (torch.tensor(b).log() - torch.tensor(a).log()) for a, b in zip(q, p, strict=True)) / 3
        reverse += sum(a * (torch.tensor(a).log() - torch.tensor(b).log()) for a, b in zip(q, p, strict=True)) / 3
        ce -= torch.log(z[i, labels[i]].exp() / z[i].exp().sum()) / 3
    for direction, kl in (("forward", forward), ("reverse", reverse)):
        for backend in ("chunked", "reference"):
            found = linear_kl(
                **inputs,
                labels=labels,
                direction=direction,
                temperature=2.0,
                ce_weight=0.1,
                logit_scale=0.5,
                backend=backend,
            )
            for ours, expected in zip(found, (0.1 * ce + kl, ce, kl, 3), strict=True):
                assert float(ours) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_cross_entropy_is_torchs(bias):
    inputs = draw_inputs(1, 20, 8, 40, bias=bias)
    leaves = {name: inputs[name].float().requires_grad_() for name in ("hidden", "weight", "bias") if name in inputs}
    labels = draw_labels(1, 20, 40, 0.3)
    ours = linear_cross_entropy(**leaves, labels=labels, chunk_size=6)
    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    logits = F.linear(wide["hidden"], wide["weight"], wide.get("bias"))
    expected = F.cross_entropy(logits, labels)
    assert ours.dtype == torch.float32
    assert relative_rms(ours, expected) < 1e-6
    for a, b in zip(
        torch.autograd.grad(ours, list(leaves.values())),
        torch.autograd.grad(expected, list(wide.values())),
        strict=True,
    ):
        assert relative_rms(a, b) < TOLERANCE


def test_large_logits_and_an_equal_teacher():
    """Logits of thousands stay finite; a student equal to its teacher has no divergence and no gradient."""
    inputs = draw_inputs(2, 8, 16, 50, size=30.0)
    for direction in ("forward", "reverse"):
        reference = run(inputs, torch.float64, "reference", direction=direction)
        found = run(inputs, torch.float32, "chunked", direction=direction)
        assert all(torch.isfinite(x).all() for x in found.values())
        assert relative_rms(found["loss"], reference["loss"]) < 1e-6
        same = {name: inputs[name.replace("teacher_", "")] for name in inputs}
        found = run(same, torch.float32, "chunked", direction=direction)
        assert float(found["kl"]) == 0
        assert not found["dhidden"].any()


def test_gradients_reach_only_what_asks_and_only_once():
    inputs = {name: x.float() for name, x in draw_inputs(3, 6, 8, 20).items()}
    hidden = inputs["hidden"].requires_grad_()
    result = linear_kl(**inputs)
    assert not any(x.requires_grad for x in result[1:])
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss = linear_kl(**inputs).loss
    assert max(x.numel() for x in saved) == hidden.numel()  # nothing kept for the frozen head
    loss.backward()
    assert inputs["weight"].grad is None
    with torch.no_grad():
        assert not linear_kl(**inputs).loss.requires_grad
    hidden.grad = None
    teacher = inputs["teacher_hidden"].requires_grad_()
    linear_kl(**inputs).loss.backward()
    assert hidden.grad is not None
    assert teacher.grad is None
    (first,) = torch.autograd.grad(linear_kl(**inputs).loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        first.sum().backward()


class Largest(TorchDispatchMode):
    """Bytes of the largest storage that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_holds_all_logits(dtype, train_head, monkeypatch):
    N, D, V, chunk = 200, 4, 1000, 20
    monkeypatch.setattr(chunked, "_SLICE_ELEMENTS", 4 * V)
    x = {name: value.to(dtype) for name, value in draw_inputs(4, N, D, V).items()}
    terms = Terms(0.5, 1.0, False, 1.0, 0.5, 9.0, -100)
    student = x["hidden"], x["weight"], x["bias"]
    teacher = x["teacher_hidden"], x["teacher_weight"], x["teacher_bias"]
    with Largest() as largest, torch.no_grad():
        operator._run(student, teacher, draw_labels(4, N, V, 0.2), terms, chunk, False, (True, train_head, train_head))
    assert largest.bytes <= chunk * V * dtype.itemsize
    with Largest() as whole, torch.no_grad():
        linear_kl(**x, backend="reference")
    assert whole.bytes >= N * V * dtype.itemsize  # what is watched would be seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    """Products and slopes are rounded, sums are not; a loss of 2^16 does not push a gradient out of range."""
    inputs = draw_inputs(5, 64, 32, 100, size=0.5)
    labels = draw_labels(5, 64, 100, 0.1)
    reference = run(inputs, torch.float64, "reference", labels=labels, ce_weight=0.5)
    ours = run(inputs, dtype, "chunked", labels=labels, ce_weight=0.5, chunk_size=20)
    eps = torch.finfo(dtype).eps
    assert ours["loss"].dtype == torch.float32
    inexact = inputs if dtype == torch.float16 else {}
    assert all(torch.equal(x.to(dtype).double(), x) for x in inexact.values())
    assert_close(ours, reference, 2 * eps)


def test_half_gradients_are_scaled_after_they_are_summed():
    """With 1/N in them before, float16 gradients of a long batch would be lost, whatever the loss scale."""
    hidden, weight = (x.half() for x in torch.randn(2, 4096, 8))
    weight = 1e-3 * weight[:64]
    labels = draw_labels(0, 4096, 64, 0.0)
    leaf, wide = hidden.requires_grad_(), hidden.detach().double().requires_grad_()
    (ours,) = torch.autograd.grad(65536 * linear_cross_entropy(leaf, weight, labels), leaf)
    (expected,) = torch.autograd.grad(65536 * F.cross_entropy(wide @ weight.double().T, labels), wide)
    assert relative_rms(ours, expected) < 5e-3


def test_autocast_mixed_dtypes_checkpoint_and_compile():
    inputs = {name: x.float() for name, x in draw_inputs(6, 12, 8, 30, size=0.5).items()}
    hidden = inputs["hidden"].requires_grad_()
    weight = inputs["weight"].requires_grad_()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_kl(**{**inputs, "hidden": hidden, "weight": weight}, chunk_size=5).loss

    expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    torch._dynamo.reset()
    ways = [
        torch.compile(loss, fullgraph=True, backend="aot_eager")(hidden, weight),
        torch.utils.checkpoint.checkpoint(loss, hidden, weight, use_reentrant=False),
    ]
    for way in ways:
        for a, b in zip(torch.autograd.grad(way, (hidden, weight)), expected, strict=True):
            assert torch.equal(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(hidden, weight)
    mixed = loss(hidden.bfloat16(), weight)
    for way in (found, mixed):
        assert way.dtype == torch.float32
        for a, b in zip(torch.autograd.grad(way, (hidden, weight)), expected, strict=True):
            assert a.dtype == torch.float32
            assert 0 < relative_rms(a, b) < 2e-2


BASE = {name: x.float() for name, x in draw_inputs(0, 4, 8, 10).items()}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": torch.zeros(10, 7)}, ValueError, ["weight", "D=8"]),
        ({"teacher_hidden": torch.zeros(3, 11)}, ValueError, ["teacher_hidden", "N=4"]),
        ({"teacher_weight": torch.zeros(9, 11)}, ValueError, ["teacher_weight", "vocab=10"]),
        ({"labels": torch.zeros(4)}, TypeError, ["labels", "float32", "int64"]),
        ({"labels": torch.tensor([0, 1, 10, 2])}, ValueError, ["labels", "10"]),
        ({"ce_weight": 0.5}, ValueError, ["ce_weight", "labels"]),
        ({"direction": "sideways"}, ValueError, ["direction", "sideways"]),
        ({"temperature": 0.0}, ValueError, ["temperature", "0.0"]),
        ({"softcap": -1.0}, ValueError, ["softcap", "-1.0"]),
        ({"chunk_size": 0}, ValueError, ["chunk_size", "0"]),
        ({"backend": "fast"}, ValueError, ["backend", "fast"]),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        linear_kl(**{**BASE, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@interpreted
@pytest.mark.parametrize(
    ("V", "temperature", "softcap", "scale", "direction", "labels"),
    [
        (200, 1.0, None, 1.0, "forward", True),
        (50, 1.0, None, 1.0, "reverse", False),
        (70, 2.0, None, 1.0, "reverse", True),
        (130, 0.5, 4.0, 0.5, "forward", True),
        (128, 1.0, 4.0, 1.0, "forward", False),
    ],
)
def test_interpreted_kernel_is_the_formula(V, temperature, softcap, scale, direction, labels, monkeypatch):
    from linearize.kernels.linear_loss import triton_turn

    monkeypatch.setattr(triton_turn, "BLOCK", 64)  # several tiles a row
    inputs = draw_inputs(V, 7, 9, V)
    options = {"direction": direction, "temperature": temperature, "softcap": softcap, "logit_scale": scale}
    if labels:
        options |= {"labels": draw_labels(V, 7, V, 0.3), "ce_weight": 0.3, "kl_weight": 0.7}
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float32, "triton", chunk_size=5, **options), reference)


@interpreted
def test_interpreted_cross_entropy_alone_and_without_gradients():
    inputs = draw_inputs(7, 13, 9, 70)
    labels = draw_labels(7, 13, 70, 0.3)
    leaves = {name: inputs[name].half().requires_grad_() for name in ("hidden", "weight", "bias")}
    wide = {name: inputs[name].requires_grad_() for name in leaves}
    ours = linear_cross_entropy(**leaves, labels=labels, chunk_size=5, backend="triton")
    expected = linear_cross_entropy(**wide, labels=labels, backend="reference")
    gradients = torch.autograd.grad(ours, list(leaves.values()))
    for a, b in zip(gradients, torch.autograd.grad(expected, list(wide.values())), strict=True):
        assert relative_rms(a, b) < 2e-3
    for direction in ("forward", "reverse"):
        with torch.no_grad():
            bare = linear_kl(**inputs, labels=labels, direction=direction, backend="reference")
            narrow = {name: x.float() for name, x in inputs.items()}
            found = linear_kl(**narrow, labels=labels, direction=direction, backend="triton")
        assert all(relative_rms(a, b) < TOLERANCE for a, b in zip(found, bare, strict=True))


@interpreted
def test_interpreted_operator_is_sound():
    x = {name: value.float() for name, value in draw_inputs(8, 13, 9, 40).items()}
    student = [x[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    teacher = [x[f"teacher_{name}"].detach() for name in ("hidden", "weight", "bias")]
    labels = draw_labels(8, 13, 40, 0.3)
    options = (0.5, 1.0, False, 1.0, 1.0, 0.0, -100, 5, True, True, True, True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator._op, (*student, *teacher, labels, *options), test_utils=checks)
    with pytest.raises(RuntimeError, match="float64"):
        linear_cross_entropy(student[0].double(), student[1].double(), labels, backend="triton")


@pytest.mark.skipif(triton_interpreted(), reason="already there")
def test_triton_kernels_in_the_interpreter():
    run_interpreted(__file__)
