"""The short convolution's Triton kernels on a real GPU, in float32, float16 and bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linearize.kernels.short_conv import short_conv, short_conv_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def draw(
    B: int, T: int, D: int, W: int, dtype: torch.dtype, bias: bool = True, states: int | None = None
) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"x": (B, T, D), "weight": (D, W)}
    if bias:
        shapes["bias"] = (D,)
    if states is not None:
        shapes["initial_state"] = (states, W - 1, D)
    return {name: torch.randn(s, generator=generator, device="cuda").to(dtype) for name, s in shapes.items()}


def poison() -> None:
    """Fill what the allocator will hand out next with NaN: outputs and workspaces must be written in full."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 26, 1 << 22, 1 << 20, 1 << 18, 1 << 16)]
    del blocks


def run(inputs: dict[str, Tensor], backend: str, double: bool = False, **options) -> dict[str, Tensor]:
    leaves = {name: (x.double() if double else x).detach().requires_grad_() for name, x in inputs.items()}
    if not double:
        poison()
    y, state = short_conv(**leaves, output_final_state=True, backend=backend, **options)
    generator = torch.Generator("cuda").manual_seed(7)
    results = {"y": y, "state": state}
    loss = sum(
        (t * torch.randn(t.shape, generator=generator, device="cuda").to(inputs["x"].dtype).to(t.dtype)).sum()
        for t in results.values()
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return results | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


def compare(inputs: dict[str, Tensor], **options) -> None:
    ours, reference = run(inputs, "triton", **options), run(inputs, "chunked", double=True, **options)
    errors = {}
    for name, expected in reference.items():
        size = expected.norm()
        error = (ours[name].double() - expected).norm()
        errors[name] = float(error / size) if size > 0 else float(error)
    assert all(error <= TOLERANCE[inputs["x"].dtype] for error in errors.values()), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_lengths(activation, dtype):
    for T in (1, 3, 32, 33, 1000):
        compare(draw(2, T, 200, 4, dtype, states=2), activation=activation)


@pytest.mark.parametrize(("D", "W"), [(1, 1), (64, 2), (130, 3), (2048, 4)])
def test_widths_and_taps(D, W):
    compare(draw(2, 300, D, W, torch.bfloat16, bias=False), activation="silu")


@pytest.mark.parametrize("initial", [False, True])
def test_packed(initial):
    bounds = torch.tensor([0, 0, 1, 3, 64, 64, 65, 700, 700], device="cuda")
    compare(draw(1, 700, 200, 4, torch.bfloat16, states=8 if initial else None), activation="silu", cu_seqlens=bounds)


def test_strided_and_large():
    x = draw(2, 300, 128, 4, torch.bfloat16)
    compare(x | {"x": x["x"].mT.contiguous().mT}, activation="silu")
    long = torch.randn(1, 1_050_000, 2048, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2048, 4, device="cuda", dtype=torch.bfloat16)
    y, _ = short_conv(long, weight)
    tail, _ = short_conv(long[:, -103:], weight)
    assert torch.equal(y[:, -100:], tail[:, 3:])


def test_compile_and_no_waiting_for_the_gpu():
    x = {name: t.requires_grad_() for name, t in draw(1, 300, 128, 4, torch.float32).items()}
    leaves = list(x.values())

    def loss(*t: Tensor) -> Tensor:
        return short_conv(*t, "silu")[0].square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    for ours, wanted in zip(
        torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves), expected, strict=True
    ):
        assert (ours - wanted).norm() <= 1e-5 * wanted.norm()
    bounds = torch.tensor([0, 100, 300], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, state = short_conv(**x, activation="silu", cu_seqlens=bounds, output_final_state=True)
        torch.autograd.grad(y.sum() + state.sum(), leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_in_a_cuda_graph(dtype):
    x = draw(3, 40, 200, 4, dtype, states=3)
    whole, final = short_conv(**x, activation="silu", output_final_state=True)
    state, token = x["initial_state"].clone(), x["x"][:, 0].clone()
    short_conv_step(token, x["weight"], state.clone(), x["bias"], "silu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = short_conv_step(token, x["weight"], state, x["bias"], "silu")
    for t in range(40):
        token.copy_(x["x"][:, t])
        graph.replay()
        assert (y.float() - whole[:, t].float()).norm() <= 5e-3 * whole[:, t].float().norm()
    assert torch.equal(state, final)
