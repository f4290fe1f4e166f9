"""The gated scan's Triton kernels on a real GPU, in float32, float16 and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.kernels.gated_scan import gated_scan, gated_scan_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, states: int | None = None) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    inputs = {"x": normal(*shape).to(dtype), "gate": torch.sigmoid(4 * normal(*shape)).to(dtype)}
    if states is not None:
        inputs["initial_state"] = normal(states, *shape[2:])
    return inputs


def poison() -> None:
    """Fill what the allocator will hand out next with NaN: outputs and workspaces must be written in full."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 26, 1 << 22, 1 << 20, 1 << 18, 1 << 16)]
    del blocks


def run(inputs: dict[str, Tensor], backend: str, double: bool = False, **options: Any) -> dict[str, Tensor]:
    leaves = {name: (x.double() if double else x).detach().requires_grad_() for name, x in inputs.items()}
    if not double:
        poison()
    y, state = gated_scan(**leaves, output_final_state=True, backend=backend, **options)
    return gradients(y, state, leaves, inputs["x"].dtype)


def gradients(y: Tensor, state: Tensor, leaves: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)
    dy, dstate = (torch.randn(x.shape, generator=generator, device="cuda") for x in (y, state))
    loss = (y * dy.to(dtype).to(y.dtype)).sum() + (state * dstate.to(state.dtype)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), "state": state.detach(), **{f"d{n}": g for n, g in zip(leaves, found, strict=True)}}


def errors(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    result = {}
    for name, expected in reference.items():
        assert ours[name].shape == expected.shape, name
        assert torch.isfinite(ours[name]).all(), name
        size = expected.double().norm()
        error = (ours[name].double() - expected.double()).norm()
        result[name] = float(error / size) if size > 0 else float(error)
    return result


def compare(inputs: dict[str, Tensor], **options: Any) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[inputs["x"].dtype]
    # The blocks in float64 are the loop to 1e-12 (tests/kernels) and much faster.
    found = errors(run(inputs, "triton", **options), run(inputs, "chunked", double=True, **options))
    assert all(error <= tolerance for error in found.values()), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_lengths(chunk_size, dtype):
    for T in (1, 2, 15, 63, 64, 65, 1000, 2048):
        compare(draw(2, T, 2, 128, dtype=dtype, states=2), chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("inner", "chunk_size", "position"),
    [((100,), 1, 0), ((300,), 128, 70), ((3, 64), 64, 5), ((4096,), None, 0)],
    ids=str,
)
def test_channels_chunks_and_positions(inner, chunk_size, position):
    compare(draw(2, 500, *inner, dtype=torch.float32, states=2), chunk_size=chunk_size, position=position)


def plain(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Every step in the inputs' dtype."""
    state, steps = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = g[:, t] * state + (1 - g[:, t]) * x[:, t]
        steps.append(state)
    return torch.stack(steps, 1), state


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_at_most_twice_the_error_of_plain_torch(dtype):
    inputs = draw(2, 130, 64, dtype=dtype)
    reference = run(inputs, "chunked", double=True)
    ours = errors(run(inputs, "triton"), reference)
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    theirs = errors(gradients(*plain(*leaves.values()), leaves, dtype), reference)
    assert all(ours[name] <= 2 * theirs[name] for name in theirs), (ours, theirs)


def test_strided_packed_and_steps():
    inputs = draw(2, 200, 3, 64, dtype=torch.float32)
    compare({name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}, chunk_size=16)
    y, final = gated_scan(**inputs, output_final_state=True)
    state = torch.zeros(2, 3, 64, device="cuda")
    steps = [gated_scan_step(inputs["x"][:, t], inputs["gate"][:, t], state) for t in range(200)]
    found = errors({"y": torch.stack(steps, 1), "state": state}, {"y": y, "state": final})
    assert max(found.values()) <= 1e-5
    bounds = torch.tensor([0, 0, 1, 64, 200], device="cuda")  # falls back to blocks in plain torch
    alone = {name: x[:1] for name, x in inputs.items()}
    packed, _ = gated_scan(**alone, chunk_size=16, cu_seqlens=bounds)
    for start, end in ((0, 1), (1, 64), (64, 200)):
        part, _ = gated_scan(**{name: x[:, start:end] for name, x in alone.items()}, chunk_size=16)
        assert errors({"y": packed[:, start:end]}, {"y": part})["y"] <= 1e-5


@pytest.mark.parametrize("chunk_size", [None, 16])
def test_graphs_compile_checkpoint_autocast(chunk_size):
    leaves = [x.detach().requires_grad_() for x in draw(2, 256, 2, 64).values()]

    def loss(*inputs: Tensor) -> Tensor:
        return gated_scan(*inputs, chunk_size)[0].float().square().sum()

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(*leaves), leaves)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both()
        expected = [t.clone() for t in both()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for t in captured:
        t.fill_(float("nan"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(ours, t) for ours, t in zip(captured, expected, strict=True))
    ways = [torch.compile(loss, fullgraph=True)(*leaves)]
    ways.append(torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False))
    with torch.autocast("cuda", torch.bfloat16):
        ways.append(loss(*leaves))
    for way in ways:
        for ours, t in zip(torch.autograd.grad(way, leaves), expected, strict=True):
            assert (ours - t).float().norm() <= 1e-2 * t.float().norm()


def test_more_elements_than_32_bits_count():
    """The last rows of a batch whose tensors have more than 2^31 elements, and more programs than 65535."""
    x = draw(1, 64, 16, 128)
    rows = (1 << 31) // (64 * 16 * 128) + 1
    with torch.no_grad():
        y, _ = gated_scan(*(value.expand(rows, -1, -1, -1) for value in x.values()), chunk_size=16)
        assert torch.equal(y[-1], gated_scan(*x.values(), chunk_size=16)[0][0])
