"""Window attention's Triton kernels on a real GPU, in float32, float16 and bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linearize.kernels.window_attention import window_attention, window_attention_step, window_cache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Against float64 on the same inputs. In 16 bits probabilities and outputs are rounded.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def draw(
    B: int, T: int, S: int, heads: tuple[int, int, int], K: int, V: int, dtype: torch.dtype, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = {"q": (B, T, heads[0], K), "k": (B, S, heads[1], K), "v": (B, S, heads[2], V)}
    return {name: torch.randn(s, generator=generator, device="cuda").to(dtype) for name, s in shapes.items()}


def poison() -> None:
    """Fill what the allocator will hand out next with NaN: outputs and workspaces must be written in full."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 26, 1 << 22, 1 << 20, 1 << 18, 1 << 16)]
    del blocks


def run(inputs: dict[str, Tensor], backend: str, double: bool = False, **options) -> dict[str, Tensor]:
    leaves = {name: (x.double() if double else x).detach().requires_grad_() for name, x in inputs.items()}
    if not double:
        poison()
    o, lse = window_attention(**leaves, return_lse=True, backend=backend, **options)
    generator = torch.Generator("cuda").manual_seed(7)
    do = torch.randn(o.shape, generator=generator, device="cuda").to(inputs["q"].dtype).to(o.dtype)
    dlse = torch.randn(lse.shape, generator=generator, device="cuda").to(lse.dtype)
    loss = (o * do).sum() + (torch.where(torch.isfinite(lse), lse, 0) * dlse).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results = {"o": o, "lse": lse, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}
    return {name: x.detach() for name, x in results.items()}


def compare(inputs: dict[str, Tensor], **options) -> None:
    # The blocked form in float64 is the dense softmax to 1e-12 (tests/kernels) and much smaller.
    reference = run(inputs, "chunked", double=True, **options)
    ours, errors = run(inputs, "triton", **options), {}
    for name, expected in reference.items():
        finite = torch.isfinite(expected)
        assert torch.equal(finite, torch.isfinite(ours[name])), name
        error, size = (ours[name].double() - expected)[finite].norm(), expected[finite].norm()
        errors[name] = float(error / size) if size > 0 else float(error)
    assert all(error <= TOLERANCE[inputs["q"].dtype] for error in errors.values()), errors


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("heads", [(4, 4, 4), (6, 2, 2), (8, 1, 8)], ids=str)
def test_lengths_and_windows(heads, dtype):
    """One compiled kernel per dtype and heads, many sizes."""
    for T, S in ((1, 1), (63, 63), (1000, 1000), (130, 200)):
        for window in (1, 64, 100, 600 if dtype == torch.float32 else 400, 5000):
            compare(draw(2, T, S, heads, 64, 64, dtype), window=window)


@pytest.mark.parametrize("width", [(16, 16), (60, 100), (128, 128), (256, 256)], ids=str)
def test_widths(width):
    for window in (64, 1024):
        compare(draw(1, 1500, 1500, (4, 2, 2), *width, torch.bfloat16), window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_softcap_and_masks(dtype):
    x = draw(2, 300, 350, (4, 2, 2), 64, 64, dtype)
    left = torch.arange(350, device="cuda") >= torch.tensor([[0], [190]], device="cuda")
    some = torch.rand(2, 350, device="cuda") < 0.5
    for key_mask in (left, some):
        for sinks in (0, 4, 200):
            compare(x, window=32, sinks=sinks, softcap=3.0, key_mask=key_mask)
    compare(x, window=32, sinks=4)


@pytest.mark.parametrize("sinks", [0, 3])
def test_packed(sinks):
    bounds = torch.tensor([0, 0, 1, 64, 64, 129, 130, 1000, 1000], device="cuda")
    for window in (8, 100, 700):
        compare(draw(1, 1000, 1000, (4, 2, 2), 64, 64, torch.bfloat16), window=window, sinks=sinks, cu_seqlens=bounds)


def test_more_than_two_to_the_31_elements():
    x = draw(1, 140_000, 140_000, (128, 1, 1), 128, 128, torch.bfloat16)
    o = window_attention(**x, window=64)
    tail = window_attention(x["q"][:, -100:], x["k"][:, -163:], x["v"][:, -163:], window=64)
    assert torch.equal(o[:, -100:], tail) or (o[:, -100:] - tail).norm() <= 1e-2 * tail.norm()


def test_strided_and_gradients_repeat():
    x = draw(2, 500, 500, (4, 2, 2), 64, 64, torch.bfloat16)
    compare({name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in x.items()}, window=50)
    first, second = (run(x, "triton", window=50) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_compile_autocast_checkpointing_and_no_waiting_for_the_gpu():
    x = {name: t.requires_grad_() for name, t in draw(1, 300, 300, (4, 2, 2), 64, 64, torch.float32).items()}
    key_mask, leaves = torch.rand(1, 300, device="cuda") < 0.9, list(x.values())

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = window_attention(q, k, v, window=50, sinks=2, key_mask=key_mask)
        return o.float().square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    for other in (torch.compile(loss, fullgraph=True), lambda *t: checkpoint(loss, *t, use_reentrant=False)):
        for ours, wanted in zip(torch.autograd.grad(other(*leaves), leaves), expected, strict=True):
            assert (ours - wanted).norm() <= 1e-5 * wanted.norm()
    with torch.autocast("cuda", torch.bfloat16):
        rough = torch.autograd.grad(loss(*leaves), leaves)
        for ours, wanted in zip(rough, expected, strict=True):
            assert ours.dtype == torch.float32 and 1e-5 < (ours - wanted).norm() / wanted.norm() < 3e-2
    bounds = torch.tensor([0, 100, 300], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(loss(*leaves), leaves)
        window_attention(**x, window=50, cu_seqlens=bounds)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("heads", "dtype"), [((8, 2, 2), torch.bfloat16), ((8, 1, 8), torch.bfloat16), ((4, 2, 2), torch.float32)], ids=str
)
def test_steps_in_a_cuda_graph(heads, dtype):
    """Decoding by replay is the whole sequence at once, with left padding."""
    x = draw(2, 60, 60, heads, 64, 64, dtype)
    key_mask = torch.arange(60, device="cuda") >= torch.tensor([[0], [9]], device="cuda")
    options = {"window": 16, "sinks": 3}
    whole = window_attention(**x, **options, key_mask=key_mask)
    cache = window_cache(x["k"][:, :20], x["v"][:, :20], 19, sinks=3, key_mask=key_mask[:, :20])
    token = [x[name][:, 20].clone() for name in "qkv"]
    spare = [t.clone() for t in cache]
    window_attention_step(*token, *spare, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = window_attention_step(*token, *cache, **options)
    for t in range(20, 60):
        for place, name in zip(token, "qkv", strict=True):
            place.copy_(x[name][:, t])
        graph.replay()
        error = (o.float() - whole[:, t].float()).norm() / whole[:, t].float().norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2), (t, error)
