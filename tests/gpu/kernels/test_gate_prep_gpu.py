"""Gate preparation on a real GPU, in float32, float16 and bfloat16."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from linearize.kernels.gate_prep import ddts_gates, softplus_gate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPERATIONS = {
    "ddts": ddts_gates,
    "ddts, silu": functools.partial(ddts_gates, activation="silu"),
    "softplus": softplus_gate,
}
# Against float64 on the same inputs. In 16 bits the key and the gradients are rounded once.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def draw(operation: str, B: int, T: int, H: int, K: int, dtype: torch.dtype, size: float = 1.0) -> dict[str, Tensor]:
    """Projections in `dtype`, parameters in float32."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    if operation == "softplus":
        x = size * (normal(B, T, H, K) if K else normal(B, T, H))
        return {"x": x.to(dtype), "A_log": normal(H), "bias": normal(H, K) if K else normal(H)}
    both = (size * normal(B, T, 2, H, K)).to(dtype)  # a and b as halves of one projection
    inputs = {"a": both[:, :, 0], "b": both[:, :, 1], "k": normal(B, T, H, K).to(dtype)}
    return inputs | {"a_bias": normal(H, K), "b_bias": normal(H, K)}


def poison() -> None:
    """Fill what the allocator will hand out next with NaN: outputs and workspaces must be written in full."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 26, 1 << 22, 1 << 20, 1 << 18, 1 << 16)]
    del blocks


def run(operation: str, inputs: dict[str, Tensor], backend: str, double: bool = False) -> dict[str, Tensor]:
    leaves = {name: (x.double() if double else x).detach().requires_grad_() for name, x in inputs.items()}
    if not double:
        poison()
    outputs = OPERATIONS[operation](**leaves, backend=backend)
    generator = torch.Generator("cuda").manual_seed(7)
    draws = [torch.randn(o.shape, generator=generator, device="cuda").bfloat16() for o in outputs]
    loss = sum((o * d.to(o.dtype)).sum() for o, d in zip(outputs, draws, strict=True))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"decay": outputs[0], "second": outputs[1]} | {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}


def compare(operation: str, inputs: dict[str, Tensor], dtype: torch.dtype) -> None:
    reference = run(operation, inputs, "reference", double=True)
    ours = run(operation, inputs, "triton")
    found = {}
    for name, expected in reference.items():
        assert torch.isfinite(ours[name]).all(), name
        difference = (ours[name].detach().double() - expected.detach()).norm()
        found[name] = float(difference / expected.detach().norm())
    assert all(error <= TOLERANCE[dtype] for error in found.values()), found


CASES = [
    # operation, B, T, H, K, dtype, size
    ("ddts", 2, 1, 1, 16, torch.float32, 1.0),
    ("ddts", 2, 1000, 3, 60, torch.float32, 10.0),
    ("ddts, silu", 2, 1000, 3, 60, torch.float32, 10.0),
    ("ddts, silu", 4, 2048, 8, 128, torch.bfloat16, 10.0),
    ("ddts", 1, 333, 2, 128, torch.float32, 100.0),
    ("ddts", 1, 100, 1, 8192, torch.float32, 1.0),
    ("ddts", 2, 1000, 8, 128, torch.float16, 1.0),
    ("ddts", 4, 2048, 8, 128, torch.bfloat16, 10.0),
    ("softplus", 2, 1, 1, 0, torch.float32, 1.0),
    ("softplus", 2, 1000, 3, 60, torch.float32, 10.0),
    ("softplus", 2, 333, 5, 0, torch.float32, 100.0),
    ("softplus", 2, 1000, 32, 0, torch.float16, 1.0),
    ("softplus", 4, 2048, 8, 128, torch.bfloat16, 10.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_formula(case):
    operation, B, T, H, K, dtype, size = case
    compare(operation, draw(operation, B, T, H, K, dtype, size), dtype)


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_cuda_graph_and_no_host_synchronisation(operation):
    x = {
        name: value.detach().requires_grad_() for name, value in draw(operation, 2, 300, 4, 64, torch.bfloat16).items()
    }

    def both() -> tuple[Tensor, ...]:
        first, second = OPERATIONS[operation](**x)
        return first, second, *torch.autograd.grad(first.sum() + second.float().square().sum(), list(x.values()))

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


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_compile_and_checkpoint(operation):
    x = {
        name: value.detach().requires_grad_() for name, value in draw(operation, 2, 300, 4, 64, torch.bfloat16).items()
    }

    def loss(*values: Tensor) -> Tensor:
        first, second = OPERATIONS[operation](**dict(zip(x, values, strict=True)))
        return first.square().sum() + second.float().square().sum()

    leaves = list(x.values())
    expected = torch.autograd.grad(loss(*leaves), leaves)
    ways = [
        torch.compile(loss, fullgraph=True)(*leaves),
        torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False),
    ]
    for way in ways:
        for ours, t in zip(torch.autograd.grad(way, leaves), expected, strict=True):
            assert (ours - t).float().norm() <= 1e-2 * t.float().norm()


def test_offsets_beyond_32_bits():
    x = draw("ddts", 1, 1, 64, 128, torch.bfloat16)
    T = 2**31 // (64 * 128) + 8
    long = {name: value.expand(1, T, 64, 128) if value.dim() == 4 else value for name, value in x.items()}
    for ours, expected in zip(ddts_gates(**long), ddts_gates(**x, backend="reference"), strict=True):
        for part in (ours[:, :1], ours[:, -1:]):
            assert (part.float() - expected.float()).norm() <= 4e-3 * expected.float().norm()
