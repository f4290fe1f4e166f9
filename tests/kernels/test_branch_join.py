"""The join of a recurrence and a window: plain torch and the Triton kernels against the float64 formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels import rows
from linearize.kernels.branch_join import branch_join
from linearize.kernels.dispatch import triton_interpreted
from tests.kernels.test_gated_scan import TOLERANCE, interpreted, many, relative_rms, run_interpreted

NAMES = ("y", "window", "logit", "scale", "window_part")


def draw(seed: int, B: int, T: int, H: int, V: int, size: float = 1.0) -> dict[str, Tensor]:
    """Float64 inputs that float16 holds exactly; `size` is that of the logits."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, T, H, V), (B, T, H, V), (B, T, H), (H, V), (H, V))
    inputs = {n: torch.randn(s, generator=generator).half().double() for n, s in zip(NAMES, shapes, strict=True)}
    return {**inputs, "logit": (size * inputs["logit"]).half().double()}


def run(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Output and gradients under a random output gradient. All but y and window stay wide in 16 bits."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {n: x.detach().to(dtype if n in ("y", "window") else wide).requires_grad_() for n, x in inputs.items()}
    o = branch_join(**leaves, backend=backend)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(7)).half().to(o.dtype)
    gradients = torch.autograd.grad((o * do).sum(), list(leaves.values()))
    assert o.dtype == dtype and all(g.dtype == x.dtype for g, x in zip(gradients, leaves.values(), strict=True))
    return {"o": o, **dict(zip(leaves, gradients, strict=True))}


def formula(inputs: dict[str, Tensor]) -> Tensor:
    """Number by number."""
    y, window, logit, scale, part = (inputs[name] for name in NAMES)
    share = 1 / (1 + torch.exp(-logit))
    return window + share[..., None] * (scale * y - part * window)


def assert_close(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    errors = {name: relative_rms(ours[name], reference[name]) for name in reference}
    assert all(error <= tolerance for error in errors.values()), errors


@many
@given(
    seed=st.integers(0, 2**31),
    T=st.sampled_from([1, 5, 33]),
    V=st.sampled_from([1, 5, 16]),
    size=st.sampled_from([0.1, 1.0, 10.0, 100.0]),
)
def test_plain_torch_is_the_formula(seed, T, V, size):
    inputs = draw(seed, 2, T, 3, V, size)
    double = run(inputs, torch.float64, "reference")
    assert relative_rms(double["o"], formula(inputs)) < 1e-12
    assert_close(run(inputs, torch.float32, "chunked"), double)


def test_without_tokens():
    assert branch_join(**{n: x.float() for n, x in draw(0, 2, 0, 3, 4).items()}).shape == (2, 0, 3, 4)


def test_wrong_arguments_are_named():
    good = {name: x.float() for name, x in draw(0, 1, 2, 3, 4).items()}
    with pytest.raises(ValueError, match="logit"):
        branch_join(**{**good, "logit": torch.zeros(1, 2, 2)})
    with pytest.raises(TypeError, match="scale"):
        branch_join(**{**good, "scale": torch.zeros(3, 4, dtype=torch.long)})


@interpreted
@pytest.mark.parametrize("case", [(1, 1, 1, 1), (2, 7, 3, 5), (1, 70, 2, 16), (2, 33, 1, 64)], ids=str)
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_interpreted_kernels_are_the_formula(case, size):
    inputs = draw(3, *case, size)
    assert_close(run(inputs, torch.float32, "triton"), run(inputs, torch.float64, "reference"))


@interpreted
def test_interpreted_sums_over_several_tiles(monkeypatch):
    monkeypatch.setattr(rows, "_PROGRAMS", 4)
    monkeypatch.setattr(rows, "_ELEMENTS", 64)
    inputs = draw(4, 2, 45, 2, 16)
    assert_close(run(inputs, torch.float32, "triton"), run(inputs, torch.float64, "reference"))


@interpreted
def test_interpreted_half_and_strided():
    inputs = draw(5, 2, 9, 3, 8)
    assert_close(run(inputs, torch.float16, "triton"), run(inputs, torch.float64, "reference"), 1e-3)
    x = {name: value.float() for name, value in inputs.items()}
    strided = {**x, "y": x["y"].transpose(1, 2).contiguous().transpose(1, 2), "window": x["window"].mT.contiguous().mT}
    assert torch.equal(branch_join(**strided, backend="triton"), branch_join(**x, backend="triton"))


@interpreted
def test_interpreted_operator_is_sound():
    from linearize.kernels.branch_join import triton_op

    x = {name: value.float().requires_grad_() for name, value in draw(6, 1, 3, 2, 4).items()}
    flat = [value.detach().flatten(0, 1) if value.dim() > 2 else value.detach() for value in x.values()]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton_op._forward_op, [value.requires_grad_() for value in flat], test_utils=checks)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **t: branch_join(**t, backend="triton").sum(), fullgraph=True, backend="aot_eager")
    ours, expected = (
        torch.autograd.grad(f(**x), list(x.values())) for f in (compiled, lambda **t: branch_join(**t).sum())
    )
    assert all(relative_rms(a, b) < TOLERANCE for a, b in zip(ours, expected, strict=True))
    with pytest.raises(RuntimeError, match="float64"):
        branch_join(**draw(0, 1, 2, 1, 4), backend="triton")


@pytest.mark.skipif(triton_interpreted(), reason="already there")
def test_triton_kernels_in_the_interpreter():
    run_interpreted(__file__)
