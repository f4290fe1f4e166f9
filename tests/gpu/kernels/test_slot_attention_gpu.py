"""Gated slot attention by Triton on a real GPU, against the float64 chunked form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linearize.kernels.slot_attention import slot_attention, slot_attention_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NAMES, STATE = ("q", "k", "v", "s", "log_decay"), ("keys", "values")
# In 16 bits the logits are rounded before the softmax.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def draw(
    B: int, T: int, H: int, K: int, V: int, M: int, dtype: torch.dtype, states: int | None = None
) -> dict[str, Tensor]:
    """s = 1 - decay, as the mixer has it, so that slots hold running means."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    decay = torch.nn.functional.logsigmoid(2 * normal(B, T, H, M) + 1) / 4
    x = {"q": 3 * normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "s": -torch.expm1(decay)}
    x = {name: value.to(dtype) for name, value in x.items()} | {"log_decay": decay}
    if states is not None:
        x |= {"keys": normal(states, H, M, K), "values": normal(states, H, M, V)}
    return x


def run(x: dict[str, Tensor], backend: str, double: bool = False, **options) -> dict[str, Tensor]:
    leaves = {name: (t.double() if double else t).detach().requires_grad_() for name, t in x.items()}
    first = (leaves["keys"], leaves["values"]) if "keys" in x else None
    o, state = slot_attention(
        *(leaves[name] for name in NAMES), initial_state=first, output_final_state=True, backend=backend, **options
    )
    results = {"o": o, **dict(zip(STATE, state, strict=True))}
    generator = torch.Generator("cuda").manual_seed(7)
    loss = sum((t * torch.randn(t.shape, generator=generator, device="cuda")).sum() for t in results.values())
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {**results, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


def compare(x: dict[str, Tensor], **options) -> None:
    reference, ours = run(x, "chunked", double=True, **options), run(x, "auto", **options)
    tolerance = TOLERANCE[x["q"].dtype]
    errors = {name: float((ours[name].double() - r).norm() / r.norm()) for name, r in reference.items()}
    assert all(error <= tolerance for error in errors.values()), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [1, 130, 1000])
def test_triton_is_the_recurrence(T, dtype):
    compare(draw(2, T, 3, 64, 128, 64, dtype, states=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed(dtype):
    bounds = torch.tensor([0, 0, 1, 64, 129, 130, 700], device="cuda")
    compare(draw(1, 700, 2, 64, 64, 32, dtype, states=6), cu_seqlens=bounds)


def test_step():
    x = draw(2, 1, 3, 128, 128, 64, torch.bfloat16, states=2)
    results = []
    for backend in ("triton", "reference"):
        state = tuple(x[name].clone() for name in STATE)
        results.append((slot_attention_step(*(x[name][:, 0] for name in NAMES), state, backend=backend), *state))
    for ours, expected in zip(*results, strict=True):
        assert (ours.float() - expected.float()).norm() <= 5e-3 * expected.float().norm()
