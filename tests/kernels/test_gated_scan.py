"""The gated scan: blocks, steps and the Triton kernels against the float64 loop."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels.dispatch import triton_interpreted
from linearize.kernels.gated_scan import gated_scan, gated_scan_step

TIMES = [0, 1, 2, 15, 16, 17, 64, 65, 130]
CHUNKS = [None, None, 1, 2, 4, 16, 128]
TOLERANCE = 1e-5

many = settings(max_examples=40, deadline=None, derandomize=True)
few = settings(max_examples=12, deadline=None, derandomize=True)
interpreted = pytest.mark.skipif(not triton_interpreted(), reason="runs in a process with TRITON_INTERPRET=1")


def draw_inputs(seed: int, *shape: int, states: int | None = None) -> dict[str, Tensor]:
    """Float64 inputs that float32 holds exactly; gates near 0, near 1 and in between."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {"x": torch.randn(shape, generator=generator)}
    inputs["gate"] = torch.sigmoid(4 * torch.randn(shape, generator=generator))
    if states is not None:
        inputs["initial_state"] = torch.randn(states, *shape[2:], generator=generator)
    return {name: x.double() for name, x in inputs.items()}


def relative_rms(ours: Tensor, reference: Tensor) -> float:
    assert ours.shape == reference.shape
    assert torch.isfinite(ours).all()
    error = (ours.detach().double() - reference.detach().double()).norm()
    size = reference.detach().double().norm()
    return float(error / size) if size > 0 else float(error)


def run(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, **options) -> dict[str, Tensor]:
    """Outputs, final state and all gradients under random output gradients."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    y, state = gated_scan(**leaves, output_final_state=True, backend=backend, **options)
    assert state is not None
    assert y.dtype == dtype
    generator = torch.Generator().manual_seed(7)
    dy = torch.randn(y.shape, generator=generator).to(y.dtype)
    dstate = torch.randn(state.shape, generator=generator).to(state.dtype)
    loss = (y * dy).sum() + (state * dstate).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"y": y, "state": state, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


def assert_close(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    errors = {name: relative_rms(ours[name], reference[name]) for name in reference}
    assert all(error <= tolerance for error in errors.values()), errors


def run_interpreted(file: str) -> None:
    """Run the tests marked `interpreted`: Triton must be imported with its interpreter on, so in a new process."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-n0", "-x", "--import-mode=importlib", "-k", "interpreted_", file]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
    assert " passed" in outcome.stdout, outcome.stdout


@many
@given(
    seed=st.integers(0, 2**31),
    T=st.sampled_from(TIMES),
    inner=st.sampled_from([(5,), (16,), (2, 3)]),
    chunk_size=st.sampled_from(CHUNKS),
    position=st.sampled_from([0, 0, 1, 5, 64, "rows"]),
    initial=st.booleans(),
)
@example(seed=0, T=17, inner=(5,), chunk_size=16, position="rows", initial=True)
@example(seed=0, T=130, inner=(5,), chunk_size=128, position=64, initial=True)
def test_blocks_are_the_recurrence(seed, T, inner, chunk_size, position, initial):
    inputs = draw_inputs(seed, 2, T, *inner, states=2 if initial else None)
    options = {"chunk_size": chunk_size, "position": torch.tensor([3, 16]) if position == "rows" else position}
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float32, "chunked", **options), reference)
    assert_close(run(inputs, torch.float64, "chunked", **options), reference, 1e-12)


@pytest.mark.parametrize("chunk_size", [None, 4, 128])
@pytest.mark.parametrize("gate", [0.0, 1e-6, 1 - 2**-20, 1.0])
def test_extreme_gates(chunk_size, gate):
    """Nothing is divided by a gate, and its logarithm is never taken."""
    inputs = draw_inputs(0, 1, 300, 4, states=1)
    inputs["gate"] = torch.full_like(inputs["gate"], gate)
    reference = run(inputs, torch.float64, "reference", chunk_size=chunk_size)
    assert_close(run(inputs, torch.float32, "chunked", chunk_size=chunk_size), reference)


def test_against_a_sum_written_by_hand():
    """y_t = Σ_j (Π_{m>j} g_m) (1 − g_j) x_j, over the chunk of t."""
    x = draw_inputs(1, 1, 12, 3)
    for backend in ("chunked", "reference"):
        y, _ = gated_scan(**x, chunk_size=4, backend=backend)
        for t in range(12):
            total = torch.zeros(3, dtype=torch.float64)
            for j in range(t // 4 * 4, t + 1):
                weight = x["gate"][0, j + 1 : t + 1].prod(0) * (1 - x["gate"][0, j])
                total += weight * x["x"][0, j]
            assert relative_rms(y[0, t], total) < 1e-12


@few
@given(seed=st.integers(0, 2**31), cut=st.integers(0, 100), chunk_size=st.sampled_from(CHUNKS))
def test_split_in_two_is_the_whole(seed, cut, chunk_size):
    x = {name: value.float() for name, value in draw_inputs(seed, 2, 100, 6, states=2).items()}
    whole, final = gated_scan(**x, chunk_size=chunk_size, output_final_state=True)
    state, parts = x["initial_state"], []
    for start, end in ((0, cut), (cut, 100)):
        part, state = gated_scan(
            x["x"][:, start:end],
            x["gate"][:, start:end],
            chunk_size,
            position=start,
            initial_state=state,
            output_final_state=True,
        )
        parts.append(part)
    assert relative_rms(torch.cat(parts, 1), whole) < TOLERANCE
    assert relative_rms(state, final) < TOLERANCE


@few
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.sampled_from([0, 0, 1, 1, 2, 17, 30, 65]), min_size=1, max_size=6),
    chunk_size=st.sampled_from(CHUNKS),
    initial=st.booleans(),
    position=st.sampled_from([0, 3]),
)
def test_packed_is_separate(seed, lengths, chunk_size, initial, position):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs = draw_inputs(seed, 1, sum(lengths), 2, 3, states=len(lengths) if initial else None)
    options = {"chunk_size": chunk_size, "position": position}
    ours = run(inputs, torch.float32, "chunked", cu_seqlens=bounds, **options)
    assert_close(ours, run(inputs, torch.float64, "reference", cu_seqlens=bounds, **options))
    for n, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        y, state = gated_scan(
            inputs["x"][:, start:end],
            inputs["gate"][:, start:end],
            initial_state=inputs["initial_state"][n : n + 1] if initial else None,
            output_final_state=True,
            **options,
        )
        assert relative_rms(ours["y"][:, start:end], y) < TOLERANCE
        assert relative_rms(ours["state"][n : n + 1], state) < TOLERANCE


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("inner", [(5,), (2, 3)])
def test_steps_are_the_recurrence(chunk_size, inner):
    x = draw_inputs(3, 2, 11, *inner, states=2)
    rows = torch.tensor([2, 9])
    y, final = gated_scan(**x, chunk_size=chunk_size, position=rows, output_final_state=True, backend="reference")
    state = x["initial_state"].float()
    address, steps = state.data_ptr(), []
    for t in range(11):
        token = (x[name][:, t].float() for name in ("x", "gate"))
        steps.append(gated_scan_step(*token, state, chunk_size, position=rows + t))
    assert state.data_ptr() == address
    assert relative_rms(torch.stack(steps, 1), y) < TOLERANCE
    assert relative_rms(state, final) < TOLERANCE
    one = torch.zeros(2, *inner).fill_(5)
    gated_scan_step(x["x"][:, 0].float(), x["gate"][:, 0].float(), one, 4, position=8)
    assert relative_rms(one, x["x"][:, 0] * (1 - x["gate"][:, 0])) < TOLERANCE


def test_strided_half_and_expanded_gradients():
    x = draw_inputs(4, 2, 65, 2, 8)
    scattered = {name: value.transpose(1, 2).contiguous().transpose(1, 2) for name, value in x.items()}
    assert_close(
        run(scattered, torch.float32, "chunked", chunk_size=16), run(x, torch.float64, "reference", chunk_size=16)
    )
    half = x["x"].bfloat16()
    y, state = gated_scan(half, x["gate"].float(), output_final_state=True)
    reference, _ = gated_scan(half.double(), x["gate"], backend="reference")
    assert y.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert relative_rms(y, reference) < torch.finfo(torch.bfloat16).eps
    leaf = x["x"].requires_grad_()
    gated_scan(leaf, x["gate"])[0].sum().backward()
    (expected,) = torch.autograd.grad(gated_scan(leaf, x["gate"], backend="reference")[0].sum(), leaf)
    assert relative_rms(leaf.grad, expected) < 1e-12


BASE = {name: value.float() for name, value in draw_inputs(0, 2, 4, 3, 8).items()}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"gate": torch.zeros(2, 4, 3, 7)}, ValueError, ["gate", "D=8"]),
        ({"gate": torch.full((2, 4, 3, 8), 1.5)}, ValueError, ["gate", "1.5", "[0, 1]"]),
        ({"x": torch.zeros(2, 4, 3, 8, dtype=torch.int64)}, TypeError, ["x", "int64"]),
        ({"chunk_size": 3}, ValueError, ["chunk_size", "3", "power of two"]),
        ({"chunk_size": 0}, ValueError, ["chunk_size", "0"]),
        ({"position": -1}, ValueError, ["position", "-1"]),
        ({"position": torch.zeros(3, dtype=torch.int64)}, ValueError, ["position", "[2]"]),
        ({"initial_state": torch.zeros(2, 8)}, ValueError, ["initial_state"]),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, ["batch must be 1"]),
        ({"backend": "fast"}, ValueError, ["backend", "fast"]),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        gated_scan(**{**BASE, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@interpreted
@pytest.mark.parametrize(
    ("T", "inner", "chunk_size", "position", "initial"),
    [
        (1, (5,), None, 0, True),
        (1, (5,), 4, 3, True),
        (67, (2, 3), None, 0, True),
        (67, (2, 3), None, 0, False),
        (67, (5,), 1, 0, True),
        (67, (2, 3), 4, 5, True),
        (67, (2, 140), 16, 0, False),  # more channels than a tile has
        (67, (5,), 16, 5, False),
        (67, (5,), 16, 32, True),
        (67, (5,), 64, 5, True),
        (150, (5,), 128, 70, True),  # segments, with a reset among them
        (150, (5,), 128, 0, False),
        (67, (2, 3), 16, [5, 16], True),  # rows at places of their own
        (1, (5,), 4, [3, 4], True),
        (150, (5,), 128, [70, 0], True),
        (30, (5,), 16, [0, 7], False),
    ],
)
def test_interpreted_kernels_are_the_recurrence(T, inner, chunk_size, position, initial):
    inputs = draw_inputs(0, 2, T, *inner, states=2 if initial else None)
    position = torch.tensor(position) if isinstance(position, list) else position
    options = {"chunk_size": chunk_size, "position": position}
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float32, "triton", **options), reference)


def shared_gates(backend: str) -> None:
    """A gate of fewer heads is one whose heads are repeated."""
    x, gate, _ = draw_inputs(3, 2, 20, 4, 3, states=2).values()
    leaf = gate[:, :, :2].float().requires_grad_()
    y, _ = gated_scan(x.float(), leaf, 4, position=torch.tensor([0, 5]), backend=backend)
    wide = gate[:, :, :2].clone().requires_grad_()
    expected, _ = gated_scan(x, wide.repeat_interleave(2, 2), 4, position=torch.tensor([0, 5]), backend="reference")
    assert relative_rms(y, expected) < TOLERANCE
    (ours,) = torch.autograd.grad(y.square().sum(), leaf)
    (wanted,) = torch.autograd.grad(expected.square().sum(), wide)
    assert relative_rms(ours, wanted) < TOLERANCE


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_gates_of_fewer_heads(backend):
    shared_gates(backend)
    with pytest.raises(ValueError, match="gate has 2 heads and x 3"):
        gated_scan(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 2, 4))


@interpreted
def test_interpreted_gates_of_fewer_heads():
    shared_gates("triton")


@interpreted
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_interpreted_kernels_in_float16(chunk_size):
    inputs = {name: value.half().double() for name, value in draw_inputs(1, 1, 70, 2, 8).items()}
    leaves = {name: value.half().requires_grad_() for name, value in inputs.items()}
    y, _ = gated_scan(**leaves, chunk_size=chunk_size, backend="triton")
    wide = {name: value.requires_grad_() for name, value in inputs.items()}
    reference, _ = gated_scan(**wide, chunk_size=chunk_size, backend="reference")
    assert relative_rms(y, reference) < 1e-3
    gradients = torch.autograd.grad(y.float().square().sum(), list(leaves.values()))
    expected = torch.autograd.grad(reference.square().sum(), list(wide.values()))
    assert all(relative_rms(a, b) < 2e-3 for a, b in zip(gradients, expected, strict=True))


@interpreted
def test_interpreted_operator_is_sound():
    """Strided inputs, torch's own checks, tracing, and one gradient asked for alone."""
    from linearize.kernels.gated_scan import triton_op

    x = {name: value.float() for name, value in draw_inputs(2, 2, 70, 2, 3, states=2).items()}
    scattered = {name: value.transpose(1, 2).contiguous().transpose(1, 2) for name, value in x.items()}
    assert_close(run(scattered, torch.float32, "triton"), run(x, torch.float64, "reference"))
    leaves = [value.requires_grad_() for value in x.values()]
    torch.library.opcheck(triton_op._forward_op, (*leaves, None, 0, 0, True))
    torch.library.opcheck(triton_op._forward_op, (*leaves, torch.tensor([0, 3]), 4, 0, True))
    compiled = torch.compile(lambda *t: gated_scan(*t, backend="triton")[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*leaves[:2]), gated_scan(*leaves[:2], backend="triton")[0])
    _, state = gated_scan(*leaves[:2], output_final_state=True, backend="triton")
    (ours,) = torch.autograd.grad(state.sum(), leaves[0])
    _, state = gated_scan(*leaves[:2], output_final_state=True)
    (expected,) = torch.autograd.grad(state.sum(), leaves[0])
    assert relative_rms(ours, expected) < TOLERANCE


@interpreted
def test_interpreted_refusals():
    x = torch.zeros(1, 4, 2)
    for change, words in (
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens"),
        ({"x": x.double(), "gate": x.double()}, "float64"),
    ):
        with pytest.raises(RuntimeError, match=words):
            gated_scan(**{"x": x, "gate": x, "backend": "triton", **change})


@pytest.mark.skipif(triton_interpreted(), reason="already there")
def test_triton_kernels_in_the_interpreter():
    run_interpreted(__file__)
