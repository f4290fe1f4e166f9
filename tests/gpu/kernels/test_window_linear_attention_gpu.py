"""The window beside linear attention on a real GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linearize.kernels.window_attention import window_cache
from linearize.kernels.window_linear_attention import (
    leaving_key,
    window_linear_attention,
    window_linear_attention_step,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# In 16 bits sums, states inside products and outputs are rounded; float16 sums run in float32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def draw(
    B: int,
    T: int,
    earlier: int,
    heads: tuple[int, int, int, int],
    K: int,
    features: int,
    dtype: torch.dtype,
    state: bool = False,
) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    (H, Hk, Hv, Hf), S = heads, T + earlier
    x = {"q": normal(B, T, H, K), "k": normal(B, S, Hk, K), "v": normal(B, S, Hv, K)}
    x |= {"phi_q": normal(B, T, H, features).softmax(-1), "phi_k": normal(B, S, Hf, features).softmax(-1)}
    x = {name: t.to(dtype) for name, t in x.items()} | {"mix": normal(H)}
    if state:
        x |= {"memory": normal(B, H, features, K), "normaliser": normal(B, H, features).exp()}
    return x


def poison() -> None:
    """Fill what the allocator will hand out next with NaN: outputs and workspaces must be written in full."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 26, 1 << 22, 1 << 20, 1 << 18, 1 << 16)]
    del blocks


def run(inputs: dict[str, Tensor], backend: str, double: bool = False, **options) -> dict[str, Tensor]:
    leaves = {name: (x.double() if double else x).detach().requires_grad_() for name, x in inputs.items()}
    if not double:
        poison()
    plain = {name: x for name, x in leaves.items() if name not in ("memory", "normaliser")}
    start = (leaves["memory"], leaves["normaliser"]) if "memory" in leaves else None
    o, state = window_linear_attention(
        **plain, initial_state=start, output_final_state=True, backend=backend, **options
    )
    results = {"o": o, "memory": state[0], "normaliser": state[1]}
    generator = torch.Generator("cuda").manual_seed(7)
    do = torch.randn(o.shape, generator=generator, device="cuda").to(inputs["q"].dtype).to(o.dtype)
    gradients = torch.autograd.grad((o * do).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return results | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


def compare(inputs: dict[str, Tensor], **options) -> None:
    ours, reference = run(inputs, "triton", **options), run(inputs, "chunked", double=True, **options)
    errors = {}
    for name, expected in reference.items():
        assert torch.isfinite(ours[name]).all(), name
        size, error = expected.norm(), (ours[name].double() - expected).norm()
        errors[name] = float(error / size) if size > 1e-9 else float(error)
    assert all(error <= TOLERANCE[inputs["q"].dtype] for error in errors.values()), errors


@pytest.mark.parametrize("shift", ["window", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_lengths(dtype, shift):
    for T in (1, 65, 700):
        compare(draw(2, T, 0, (4, 2, 2, 4), 64, 128, dtype), window=64, shift=shift)


@pytest.mark.parametrize(("K", "features"), [(60, 120), (128, 256)])
def test_widths(K, features):
    compare(draw(1, 500, 0, (4, 1, 4, 2), K, features, torch.bfloat16), window=64, softcap=5.0)


def test_going_on_with_padding():
    key_mask = torch.arange(264, device="cuda") >= torch.tensor([[0], [90]], device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        compare(draw(2, 200, 64, (4, 2, 2, 4), 64, 128, dtype, state=True), window=64, key_mask=key_mask)


@pytest.mark.parametrize("shift", ["window", "none"])
def test_packed(shift):
    bounds = torch.tensor([0, 0, 1, 64, 64, 129, 200, 700, 700], device="cuda")
    compare(draw(1, 700, 0, (4, 2, 2, 4), 64, 128, torch.bfloat16), window=16, shift=shift, cu_seqlens=bounds)


def test_compile_autocast_and_no_waiting_for_the_gpu():
    x = {name: t.requires_grad_() for name, t in draw(1, 300, 0, (4, 2, 2, 4), 64, 128, torch.float32).items()}
    leaves = list(x.values())

    def loss(*t: Tensor) -> Tensor:
        return window_linear_attention(*t, window=64)[0].float().square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    with torch.autocast("cuda", torch.bfloat16):
        rough = torch.autograd.grad(loss(*leaves), leaves)
    for ours, cast, wanted in zip(compiled, rough, expected, strict=True):
        assert (ours - wanted).norm() <= 1e-5 * wanted.norm()
        assert (cast - wanted).norm() <= 5e-2 * wanted.norm()
    bounds = torch.tensor([0, 100, 300], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, _ = window_linear_attention(**x, window=64, cu_seqlens=bounds)
        torch.autograd.grad(o.sum(), leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_in_a_cuda_graph(dtype):
    """Decoding by replay is the whole sequence at once."""
    x, W = draw(2, 60, 0, (8, 2, 2, 8), 64, 128, dtype), 16
    whole, end = window_linear_attention(**x, window=W, output_final_state=True)
    first = {name: t[:, :30] if name != "mix" else t for name, t in x.items()}
    _, state = window_linear_attention(**first, window=W, output_final_state=True)
    ring = window_cache(x["k"][:, :30], x["v"][:, :30], W + 1)
    sums = [t.contiguous() for t in state]
    token = [x[name][:, 30].clone() for name in ("q", "k", "v", "phi_q")] + [x["phi_k"][:, 30 - W].clone()]
    spare = [t.clone() for t in (*ring, *sums)]
    window_linear_attention_step(*token, x["mix"], *spare, window=W)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = window_linear_attention_step(*token, x["mix"], *ring, *sums, window=W)
    for t in range(30, 60):
        for place, name in zip(token[:4], ("q", "k", "v", "phi_q"), strict=True):
            place.copy_(x[name][:, t])
        token[4].copy_(x["phi_k"][:, t - W])
        assert torch.equal(leaving_key(ring[0], ring[2], W), x["k"][:, t - W])
        graph.replay()
        error = (o.float() - whole[:, t].float()).norm() / whole[:, t].float().norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2), (t, error)
    for ours, expected in zip(sums, end, strict=True):
        assert (ours - expected).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm()
