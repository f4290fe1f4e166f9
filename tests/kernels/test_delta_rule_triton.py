"""The delta rule's Triton kernels in Triton's CPU interpreter.

Triton must be imported with its interpreter already on, so this file runs itself in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linearize.kernels.delta_rule import delta_rule, delta_rule_step
from tests.kernels.in_interpreter import interpreted, run_interpreted, starts_it
from tests.kernels.test_delta_rule import draw_inputs

# Masked entries may overflow, as on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DECAYS = ["none", "scalar", "vector"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@starts_it
def test_in_the_interpreter():
    run_interpreted(__file__)


def run(
    inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, final: bool = True, **options
) -> dict[str, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {
        name: x.detach().to(dtype if name in ("q", "k", "v") else wide).requires_grad_() for name, x in inputs.items()
    }
    o, state = delta_rule(**leaves, output_final_state=final, backend=backend, **options)
    assert o.dtype == dtype
    generator = torch.Generator().manual_seed(7)
    loss = (o * torch.randn(o.shape, generator=generator).to(torch.float16).to(o.dtype)).sum()
    results = {"o": o}
    if final:
        results["state"] = state
        loss = loss + (state * torch.randn(state.shape, generator=generator).to(state.dtype)).sum()
    else:
        assert state is None
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    for name, leaf, gradient in zip(leaves, leaves.values(), gradients, strict=True):
        assert gradient.dtype == leaf.dtype
        results[f"d{name}"] = gradient
    return results


def compare(inputs: dict[str, Tensor], dtype: torch.dtype = torch.float32, **options) -> None:
    inputs.update({name: inputs[name].to(dtype).double() for name in ("q", "k", "v")})
    reference = run(inputs, torch.float64, "reference", **options)
    ours = run(inputs, dtype, "triton", **options)
    errors = {}
    for name, expected in reference.items():
        assert ours[name].shape == expected.shape
        assert torch.isfinite(ours[name]).all(), name
        error = (ours[name].detach().double() - expected.detach()).norm()
        size = expected.detach().norm()
        errors[name] = float(error / size) if size > 0 else float(error)
    assert all(error <= TOLERANCE[dtype] for error in errors.values()), errors


CASES = [
    # B, T, H, K, V, decay, initial state, final state
    (1, 1, 1, 16, 16, "vector", True, True),
    (2, 63, 1, 16, 32, "none", True, True),
    (1, 64, 2, 60, 64, "none", False, False),
    (1, 65, 1, 16, 100, "scalar", True, True),
    (1, 130, 2, 64, 60, "scalar", False, True),
    (2, 100, 2, 16, 40, "scalar", True, False),
    (1, 65, 1, 100, 32, "vector", True, True),
    (2, 100, 1, 60, 40, "vector", False, False),
    (1, 70, 1, 16, 300, "scalar", True, True),
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_recurrence(case):
    B, T, H, K, V, decay, initial, final = case
    compare(draw_inputs(0, B, T, H, K, V, decay, B if initial else None), final=final)


@interpreted
@pytest.mark.parametrize("decay", DECAYS)
def test_float16(decay):
    compare(draw_inputs(1, 1, 130, 2, 32, 32, decay, states=1), torch.float16)


@interpreted
@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("strength", [1e-4, 1.0, 3.0, 9.0, 50.0])
def test_one_decay_strength(decay, strength):
    """Each strength takes another way through a chunk; gradients of strong decays are tiny and still right."""
    compare(draw_inputs(2, 1, 100, 1, 16, 16, decay, states=1, weakest=strength, strongest=strength))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_a_decay_to_nothing_has_no_gradient(decay, dtype):
    """Rates such as -exp(A) multiply the log decay's gradient by the log decay: no rounding error may stand there."""
    inputs = draw_inputs(15, 1, 130, 1, 16, 16, decay, states=1, strongest=0.1)
    vanished = torch.zeros_like(inputs["log_decay"], dtype=torch.bool)
    for start, strength in enumerate((1e2, 1e4, 1e8, torch.inf)):
        vanished[:, 5 + start :: 31] = True
        inputs["log_decay"][:, 5 + start :: 31] = -strength
    compare(inputs, dtype)
    gradient = run(inputs, dtype, "triton")["dlog_decay"]
    assert (gradient[vanished] == 0).all()


@interpreted
def test_strengths_mixed_between_chunks():
    inputs = draw_inputs(3, 1, 256, 1, 16, 16, "vector", states=1, weakest=0.1, strongest=0.5)
    inputs["log_decay"][:, 64:128] *= 6
    inputs["log_decay"][:, 130] = -50
    inputs["log_decay"][:, 192:, :, 0] *= 20
    compare(inputs)


@interpreted
@pytest.mark.parametrize("decay", DECAYS)
def test_equal_keys_strong_and_no_writing(decay):
    """The worst-conditioned chunk, then eigenvalues down to −1 and steps that write nothing."""
    inputs = draw_inputs(4, 1, 70, 1, 16, 16, decay, states=1, strongest=0.1)
    inputs["k"][:] = inputs["k"][:, :1]
    compare(inputs)
    inputs = draw_inputs(4, 1, 70, 1, 32, 16, decay, states=1, largest_beta=2.0)
    inputs["beta"][:, 3::7] = 0
    compare(inputs)


@interpreted
@pytest.mark.parametrize("decay", DECAYS)
def test_packed(decay):
    bounds = torch.tensor([0, 0, 3, 70, 70, 71, 200, 200])
    inputs = draw_inputs(5, 1, 200, 2, 16, 16, decay, states=7)
    compare(inputs, cu_seqlens=bounds)
    inputs.pop("initial_state")
    compare(inputs, cu_seqlens=bounds, final=False)


@interpreted
@pytest.mark.parametrize("decay", DECAYS)
def test_strided_inputs_and_gradients(decay):
    inputs = draw_inputs(6, 2, 70, 2, 16, 16, decay)
    strided = {}
    for name, x in inputs.items():
        x = torch.stack([x, x], 2)[:, :, 1] if name in "qkv" else x.transpose(0, 1).contiguous().transpose(0, 1)
        assert not x.is_contiguous()
        strided[name] = x
    leaves = {name: value.float().requires_grad_() for name, value in strided.items()}
    assert not leaves["beta"].is_contiguous()
    o, _ = delta_rule(**leaves, backend="triton")
    o.sum().backward()  # an expanded gradient
    reference, _ = delta_rule(**leaves)
    assert (o - reference).norm() <= 1e-5 * reference.norm()
    expected = torch.autograd.grad(reference.sum(), list(leaves.values()))
    for leaf, gradient in zip(leaves.values(), expected, strict=True):
        assert (leaf.grad - gradient).norm() <= 1e-5 * gradient.norm()


@interpreted
def test_only_the_state_is_used():
    x = {name: v.float().requires_grad_() for name, v in draw_inputs(7, 1, 70, 1, 16, 16, "scalar").items()}
    gradients = []
    for backend in ("triton", "chunked"):
        _, state = delta_rule(**x, output_final_state=True, backend=backend)
        gradients.append(torch.autograd.grad(state.square().sum(), list(x.values()), allow_unused=True))
    for ours, expected in zip(*gradients, strict=True):
        assert (ours - (0 if expected is None else expected)).norm() <= 1e-5 * (1 + ours.norm())


@interpreted
def test_narrow_blocks(monkeypatch):
    """Several blocks along both widths."""
    from linearize.kernels.delta_rule import launch

    pick = launch.Launch(16, 4, 1)
    monkeypatch.setattr(launch, "prepare_launch", lambda *_: (pick, 16))
    monkeypatch.setattr(launch, "scan_launch", lambda *_, **__: pick)
    monkeypatch.setattr(launch, "finish_launch", lambda *_: (pick, 16))
    for decay in DECAYS:
        compare(draw_inputs(8, 1, 70, 1, 40, 40, decay, states=1))


@interpreted
@pytest.mark.parametrize("decay", DECAYS)
def test_step(decay):
    x = {name: v.float() for name, v in draw_inputs(9, 2, 1, 3, 60, 100, decay, states=2).items()}
    initial = x.pop("initial_state")
    token = {name: value[:, 0] for name, value in x.items()}
    results = []
    for backend in ("triton", "chunked"):
        state = initial.transpose(2, 3).contiguous().transpose(2, 3)  # strides of its own
        results.append((delta_rule_step(**token, state=state, backend=backend), state))
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() <= 1e-5 * expected.norm()


@interpreted
def test_what_has_no_kernel_says_so():
    x = {name: value.float() for name, value in draw_inputs(0, 1, 4, 1, 300, 16, "none").items()}
    with pytest.raises(RuntimeError, match="K=256"):
        delta_rule(**x, backend="triton")
    x.update({name: x[name][..., :8].double() for name in ("q", "k")})
    with pytest.raises(RuntimeError, match="float64"):
        delta_rule(**x, backend="triton")


@interpreted
@pytest.mark.parametrize("decay", DECAYS)
def test_the_operator_is_sound(decay):
    """torch's own checks: schema, registration, shapes without data, and tracing."""
    from linearize.kernels.delta_rule import triton_autograd

    x = {name: v.float().requires_grad_() for name, v in draw_inputs(10, 1, 70, 2, 16, 16, decay, 1).items()}
    arguments = (x["q"], x["k"], x["v"], x["beta"], x.get("log_decay"), x["initial_state"], 0.25, None, True)
    torch.library.opcheck(triton_autograd._forward_op, arguments)


@interpreted
@pytest.mark.parametrize("decay", ["none", "vector"])
def test_torch_compile(decay):
    x = [v.float().requires_grad_() for v in draw_inputs(11, 1, 70, 2, 16, 16, decay).values()]

    def loss(*inputs: Tensor) -> Tensor:
        return delta_rule(*inputs, backend="triton")[0].square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(torch.autograd.grad(compiled(*x), x), torch.autograd.grad(loss(*x), x), strict=True):
        assert torch.equal(ours, expected)


@interpreted
def test_torch_compile_step():
    x = {name: value.float() for name, value in draw_inputs(12, 2, 1, 2, 16, 16, "vector", states=2).items()}
    initial = x.pop("initial_state")
    token = {name: value[:, 0] for name, value in x.items()}
    states = [initial.clone() for _ in range(2)]

    def step(state: Tensor) -> Tensor:
        return delta_rule_step(**token, state=state, backend="triton")

    torch._dynamo.reset()
    outputs = [step(states[0]), torch.compile(step, fullgraph=True, backend="aot_eager")(states[1])]
    assert torch.equal(*outputs)
    assert torch.equal(*states)


@interpreted
def test_mixed_dtypes_and_autocast():
    x = {name: v.half().float() for name, v in draw_inputs(13, 1, 70, 1, 16, 16, "vector").items()}
    expected, _ = delta_rule(**x)
    o, _ = delta_rule(**{**x, "v": x["v"].half()}, backend="triton")
    assert o.dtype == torch.float16
    assert (o - expected).norm() <= 1e-3 * expected.norm()
    with torch.autocast("cpu", torch.float16):
        o, _ = delta_rule(**x, backend="triton")
    assert (o - expected).norm() <= 2e-3 * expected.norm()
