"""The Triton kernels of linear attention in Triton's CPU interpreter; `test_triton_interpreted.py` runs "
"this file."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from linearize.kernels.linear_attention import launch, linear_attention, linear_attention_step

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked entries may overflow, as on a GPU

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def draw_inputs(
    seed: int,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    decay: str,
    bonus: bool = False,
    states: int | None = None,
    weakest: float = 1e-4,
    strongest: float = 50.0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Float64 inputs that the dtypes of the run hold exactly."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    shapes = {"constant": (H,), "scalar": (B, T, H), "vector": (B, T, H, K)}
    if decay in shapes:
        low, high = math.log(weakest), math.log(strongest)
        exponent = torch.rand(shapes[decay], generator=generator) * (high - low) + low
        inputs["log_decay"] = -exponent.exp().clamp(weakest, strongest)
    if bonus:
        inputs["bonus"] = normal(H, K)
    if states is not None:
        inputs["initial_state"] = normal(states, H, K, V)
    return {name: x.double() for name, x in inputs.items()}


def run(
    inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, final: bool = True, **options
) -> dict[str, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {name: x.to(dtype if name in ("q", "k", "v") else wide).requires_grad_() for name, x in inputs.items()}
    o, state = linear_attention(**leaves, output_final_state=final, backend=backend, **options)
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
    # B, T, H, K, V, decay, bonus, initial state, final state
    (1, 1, 1, 16, 16, "vector", False, True, True),
    (2, 63, 1, 16, 32, "none", False, True, True),
    (1, 64, 2, 60, 64, "none", False, False, False),
    (1, 65, 1, 16, 100, "constant", False, True, True),
    (1, 130, 2, 64, 60, "scalar", False, False, True),
    (2, 100, 2, 16, 40, "scalar", False, True, False),
    (1, 65, 1, 100, 32, "vector", False, True, True),
    (2, 100, 1, 60, 40, "vector", False, False, False),
    (1, 100, 2, 32, 16, "vector", True, True, True),
    (1, 70, 1, 16, 16, "scalar", True, True, True),
    (1, 70, 1, 16, 16, "none", True, False, False),
    (1, 70, 1, 16, 300, "scalar", False, True, True),  # values too wide for the role of a state's rows
    (1, 70, 1, 16, 300, "none", False, False, False),
    (1, 70, 1, 64, 300, "vector", False, True, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_recurrence(case):
    B, T, H, K, V, decay, bonus, initial, final = case
    compare(draw_inputs(0, B, T, H, K, V, decay, bonus, B if initial else None), final=final)


@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
def test_float16(decay):
    compare(draw_inputs(1, 1, 130, 2, 32, 32, decay, states=1, dtype=torch.float16), torch.float16)


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("strongest", [0.5, 1.2, 3.0])
def test_float16_weak_decays(strongest, bonus):
    """Chunks for the kernels without branches, for those with, and both kinds in one sequence."""
    inputs = draw_inputs(
        14, 1, 150, 1, 32, 32, "vector", bonus, states=1, weakest=0.2, strongest=strongest, dtype=torch.float16
    )
    inputs["log_decay"][:, :64] *= 0.5
    compare(inputs, torch.float16)


@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("strength", [1e-4, 1.0, 3.0, 9.0, 50.0])
def test_one_decay_strength(decay, strength):
    """Each strength takes another way through a chunk; gradients of strong decays are tiny and still "
    "right."""
    compare(draw_inputs(2, 1, 100, 1, 16, 16, decay, states=1, weakest=strength, strongest=strength))


@pytest.mark.parametrize("bonus", [False, True])
def test_strengths_mixed_between_chunks(bonus):
    inputs = draw_inputs(3, 1, 256, 1, 16, 16, "vector", bonus, states=1, weakest=0.1, strongest=0.5)
    inputs["log_decay"][:, 64:128] *= 6
    inputs["log_decay"][:, 130] = -50
    inputs["log_decay"][:, 192:, :, 0] *= 20
    compare(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_a_decay_to_nothing_has_no_gradient(decay, bonus, dtype):
    """Rates such as -exp(w) multiply the log decay's gradient by the log decay: no rounding error may stand there."""
    inputs = draw_inputs(15, 1, 130, 1, 16, 16, decay, bonus, states=1, strongest=0.1, dtype=dtype)
    vanished = torch.zeros_like(inputs["log_decay"], dtype=torch.bool)
    for start, strength in enumerate((1e2, 1e4, 1e8, math.inf)):
        vanished[:, 5 + start :: 31] = True
        inputs["log_decay"][:, 5 + start :: 31] = -strength
    compare(inputs, dtype)
    gradient = run(inputs, dtype, "triton")["dlog_decay"]
    assert (gradient[vanished] == 0).all()


@pytest.mark.parametrize("decay", ["none", "constant", "scalar", "vector"])
def test_packed(decay):
    bounds = torch.tensor([0, 0, 3, 70, 70, 71, 200, 200])
    inputs = draw_inputs(4, 1, 200, 2, 16, 16, decay, states=7)
    compare(inputs, cu_seqlens=bounds)
    compare({name: x for name, x in inputs.items() if name != "initial_state"}, cu_seqlens=bounds, final=False)


@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
@pytest.mark.parametrize("states", [None, 2])
def test_segments(decay, states, monkeypatch):
    """Sequences cut into more segments than fit evenly."""
    monkeypatch.setattr(launch, "segments", lambda *_: 4)
    compare(draw_inputs(5, 2, 300, 1, 16, 40, decay, states=states), final=states is not None)


@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
def test_strided_inputs_and_gradients(decay):
    inputs = draw_inputs(6, 2, 70, 2, 16, 16, decay)
    strided = {}
    for name, x in inputs.items():
        strided[name] = torch.stack([x, x], 2)[:, :, 1] if name in "qkv" else x.transpose(0, 1).contiguous()
        strided[name] = strided[name] if name in "qkv" else strided[name].transpose(0, 1)
        assert not strided[name].is_contiguous()
    compare(strided)
    x = {name: value.float().requires_grad_() for name, value in inputs.items()}
    o, _ = linear_attention(**x, backend="triton")
    o.sum().backward()  # an expanded gradient
    reference, _ = linear_attention(**x)
    expected = torch.autograd.grad(reference.sum(), list(x.values()))
    for leaf, gradient in zip(x.values(), expected, strict=True):
        assert (leaf.grad - gradient).norm() <= 1e-5 * gradient.norm()


def test_only_the_state_is_used():
    x = {name: v.float().requires_grad_() for name, v in draw_inputs(7, 1, 70, 1, 16, 16, "scalar").items()}
    gradients = []
    for backend in ("triton", "chunked"):
        _, state = linear_attention(**x, output_final_state=True, backend=backend)
        gradients.append(torch.autograd.grad(state.square().sum(), list(x.values()), allow_unused=True))
    for ours, expected in zip(*gradients, strict=True):
        assert (ours - (0 if expected is None else expected)).norm() <= 1e-5 * (1 + ours.norm())


def test_every_launch_in_the_table(monkeypatch):
    """Narrower blocks than the default's: several programs along both widths."""
    for block in (16, 32, 64):
        pick = launch.Launch(block, 4, 1)
        monkeypatch.setattr(launch, "scan_launch", lambda *_, pick=pick, **__: pick)
        monkeypatch.setattr(launch, "prepare_launch", lambda *_, pick=pick: pick)
        monkeypatch.setattr(launch, "finish_launch", lambda *_, pick=pick: (pick, pick.block))
        for decay in ("scalar", "vector"):
            compare(draw_inputs(8, 1, 70, 1, 60, 64, decay, states=1))


@pytest.mark.parametrize("decay", ["none", "constant", "scalar", "vector"])
@pytest.mark.parametrize("bonus", [False, True])
def test_step(decay, bonus):
    x = {name: v.float() for name, v in draw_inputs(9, 2, 1, 3, 60, 100, decay, bonus, states=2).items()}
    g = x.get("log_decay")
    g = g[:, 0] if g is not None and decay != "constant" else g
    results = []
    for backend in ("triton", "chunked"):
        state = (
            x["initial_state"].transpose(2, 3).contiguous().transpose(2, 3).clone(memory_format=torch.preserve_format)
        )
        token = (x[name][:, 0] for name in ("q", "k", "v"))
        results.append((linear_attention_step(*token, state, g, bonus=x.get("bonus"), backend=backend), state))
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() <= 1e-5 * expected.norm()


def test_what_has_no_kernel_says_so():
    x = {name: value.float() for name, value in draw_inputs(0, 1, 4, 1, 300, 16, "none").items()}
    with pytest.raises(RuntimeError, match="K=256"):
        linear_attention(**x, backend="triton")
    with pytest.raises(RuntimeError, match="float64"):
        linear_attention(**{name: value[..., :8].double() for name, value in x.items()}, backend="triton")


@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
def test_the_operators_are_sound(decay):
    """torch's own checks: schema, registration, shapes without data, and tracing."""
    from linearize.kernels.linear_attention import triton_op

    x = [v.float().requires_grad_() for v in draw_inputs(10, 1, 70, 2, 16, 16, decay, states=1).values()]
    q, k, v, *g, start = x
    torch.library.opcheck(triton_op._forward_op, (q, k, v, g[0] if g else None, None, start, 0.25, None, True))


@pytest.mark.parametrize("decay", ["none", "vector"])
def test_torch_compile(decay):
    x = [v.float().requires_grad_() for v in draw_inputs(11, 1, 70, 2, 16, 16, decay).values()]

    def loss(*inputs: Tensor) -> Tensor:
        return linear_attention(*inputs, backend="triton")[0].square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(torch.autograd.grad(compiled(*x), x), torch.autograd.grad(loss(*x), x), strict=True):
        assert torch.equal(ours, expected)


def test_torch_compile_step():
    x = {name: value.float() for name, value in draw_inputs(12, 2, 1, 2, 16, 16, "vector", states=2).items()}
    token = [x[name][:, 0] for name in ("q", "k", "v")]
    states = [x["initial_state"].clone() for _ in range(2)]

    def step(state: Tensor) -> Tensor:
        return linear_attention_step(*token, state, x["log_decay"][:, 0], backend="triton")

    torch._dynamo.reset()
    outputs = [step(states[0]), torch.compile(step, fullgraph=True, backend="aot_eager")(states[1])]
    assert torch.equal(*outputs)
    assert torch.equal(*states)


def test_mixed_dtypes_and_autocast():
    x = {name: v.float() for name, v in draw_inputs(13, 1, 70, 1, 16, 16, "vector", dtype=torch.float16).items()}
    expected, _ = linear_attention(**x)
    o, _ = linear_attention(**{**x, "v": x["v"].half()}, backend="triton")
    assert o.dtype == torch.float16
    assert (o - expected).norm() <= 1e-3 * expected.norm()
    with torch.autocast("cpu", torch.float16):
        o, _ = linear_attention(**x, backend="triton")
    assert (o - expected).norm() <= 2e-3 * expected.norm()
