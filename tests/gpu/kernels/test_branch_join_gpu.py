"""The join of a recurrence and a window on a real GPU, in float32, float16 and bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linearize.kernels.branch_join import branch_join

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Against float64 on the same inputs. In 16 bits the output and the gradients are rounded once.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
SHAPES = [(1, 1, 1, 1), (2, 333, 3, 60), (3, 1000, 8, 128), (2, 4096, 32, 64), (1, 100, 2, 1000)]


def draw(B: int, T: int, H: int, V: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """y is half of a wider tensor; all but y and the window are float32."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    inputs = {"y": normal(B, T, H, 2 * V).to(dtype)[..., :V], "window": normal(B, T, H, V).to(dtype)}
    return {**inputs, "logit": 5 * normal(B, T, H), "scale": normal(H, V), "window_part": normal(H, V)}


def run(inputs: dict[str, Tensor], backend: str, double: bool = False) -> dict[str, Tensor]:
    leaves = {name: (x.double() if double else x).detach().requires_grad_() for name, x in inputs.items()}
    o = branch_join(**leaves, backend=backend)
    do = torch.randn(o.shape, generator=torch.Generator("cuda").manual_seed(7), device="cuda").bfloat16()
    gradients = torch.autograd.grad((o * do.to(o.dtype)).sum(), list(leaves.values()))
    return {"o": o, **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_are_the_formula(shape, dtype):
    inputs = draw(*shape, dtype)
    reference, ours = run(inputs, "reference", double=True), run(inputs, "triton")
    found = {}
    for name, expected in reference.items():
        assert torch.isfinite(ours[name]).all(), name
        found[name] = float((ours[name].detach().double() - expected.detach()).norm() / expected.detach().norm())
    assert all(error <= TOLERANCE[dtype] for error in found.values()), found
    assert all(torch.equal(a, b) for a, b in zip(ours.values(), run(inputs, "triton").values(), strict=True))
