"""Fused norm and gate on a real GPU, in float32, float16 and bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linearize.kernels.norm_gate import norm_gate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Against float64 on the same inputs. In 16 bits the output and the gradients are rounded once.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def draw(shape: tuple[int, ...], weight: str, gate: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """weight: "" none, "row" [V], "head" [H,V], in float32. The gate is half of a wider projection."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    inputs = {"x": normal(*shape).to(dtype)}
    if weight:
        inputs["weight"] = normal(*(shape[-1:] if weight == "row" else shape[-2:]))
    if gate:
        inputs["gate"] = (3 * normal(*shape[:-1], 2 * shape[-1])).to(dtype)[..., : shape[-1]]
    return inputs


def poison() -> None:
    """Fill what the allocator will hand out next with NaN: outputs and workspaces must be written in full."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 26, 1 << 22, 1 << 20, 1 << 18, 1 << 16)]
    del blocks


def run(inputs: dict[str, Tensor], backend: str, double: bool = False, **options) -> dict[str, Tensor]:
    leaves = {name: (x.double() if double else x).detach().requires_grad_() for name, x in inputs.items()}
    if not double:
        poison()
    y = norm_gate(**leaves, backend=backend, **options)
    dy = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(7), device="cuda").bfloat16()
    gradients = torch.autograd.grad((y * dy.to(y.dtype)).sum(), list(leaves.values()))
    return {"y": y} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


CASES = [
    # shape, weight, gate, order, activation, dtype
    ((1, 2), "row", True, "norm_then_gate", "swish", torch.float32),
    ((3, 1000, 3, 60), "head", True, "norm_then_gate", "swish", torch.float32),
    ((3, 1000, 3, 60), "head", True, "gate_then_norm", "sigmoid", torch.float32),
    ((2, 333, 2048), "row", True, "gate_then_norm", "swish", torch.float32),
    ((300, 16384), "row", True, "norm_then_gate", "sigmoid", torch.float32),
    ((3, 1000, 3, 60), "", False, "norm_then_gate", "swish", torch.float16),
    ((2, 1000, 8, 128), "head", True, "norm_then_gate", "sigmoid", torch.float16),
    ((4, 2048, 16, 64), "row", True, "norm_then_gate", "swish", torch.bfloat16),
    ((2, 1000, 8, 256), "head", True, "gate_then_norm", "swish", torch.bfloat16),
    ((2, 500, 5000), "row", False, "gate_then_norm", "swish", torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_formula(case):
    shape, weight, gate, order, activation, dtype = case
    inputs = draw(shape, weight, gate, dtype)
    reference = run(inputs, "reference", double=True, order=order, activation=activation)
    ours = run(inputs, "triton", order=order, activation=activation)
    found = {}
    for name, expected in reference.items():
        assert torch.isfinite(ours[name]).all(), name
        difference = (ours[name].detach().double() - expected.detach()).norm()
        found[name] = float(difference / expected.detach().norm())
    assert all(error <= TOLERANCE[dtype] for error in found.values()), found


@pytest.mark.parametrize("order", ["norm_then_gate", "gate_then_norm"])
def test_cuda_graph_and_no_host_synchronisation(order):
    inputs = draw((2, 300, 4, 64), "head", True, torch.bfloat16)
    x = {name: value.detach().requires_grad_() for name, value in inputs.items()}

    def both() -> tuple[Tensor, ...]:
        y = norm_gate(**x, order=order)
        return y, *torch.autograd.grad(y.float().square().sum(), list(x.values()))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = [t.clone() for t in both()]
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = both()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))  # bit for bit
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for t in captured:
        t.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for ours, t in zip(captured, expected, strict=True):
        assert torch.equal(ours, t)


def test_compile_checkpoint_autocast():
    inputs = draw((2, 300, 4, 64), "head", True, torch.bfloat16)
    leaves = [value.detach().requires_grad_() for value in inputs.values()]

    def loss(*values: Tensor) -> Tensor:
        y = norm_gate(*values, order="gate_then_norm").float()
        return (y * torch.arange(64, device="cuda")).square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    ways = [
        torch.compile(loss, fullgraph=True)(*leaves),
        torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False),
    ]
    with torch.autocast("cuda", torch.bfloat16):
        ways.append(loss(*leaves))
    for way in ways:
        for ours, t in zip(torch.autograd.grad(way, leaves), expected, strict=True):
            assert (ours - t).float().norm() <= 1e-2 * t.float().norm()


def test_offsets_beyond_32_bits():
    x = torch.randn(1, 64, 128, device="cuda", dtype=torch.bfloat16)
    long = x.expand(2**31 // (64 * 128) + 8, 64, 128)
    y, expected = norm_gate(long, None, long), norm_gate(x, None, x, backend="reference")
    for part in (y[:1], y[-1:]):
        assert (part.float() - expected.float()).norm() <= 4e-3 * expected.float().norm()
