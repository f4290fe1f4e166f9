"""RAT with a window: its Triton kernels on a real GPU, in float32, float16 and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.kernels.gated_scan import gated_scan
from linearize.kernels.rat_attention import rat_window_attention, rat_window_attention_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Against float64 on the same inputs. In 16 bits probabilities, outputs and what the window found are rounded.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.5e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def draw(T: int, S: int, C: int, last: int, heads: tuple[int, int], K: int, dtype: torch.dtype) -> list[Tensor]:
    """Inputs of two rows, summaries for `last` tokens."""
    generator = torch.Generator("cuda").manual_seed(0)
    H, G = heads
    shapes = [(2, T, H, K), (2, S, G, K), (2, S, G, K), (2, last // C + 1, G, K), (2, last // C + 1, G, K)]
    x = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]
    return [*x, torch.randn(H, generator=generator, device="cuda")]


def poison() -> None:
    """Fill what the allocator will hand out next with NaN: outputs and workspaces must be written in full."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 26, 1 << 22, 1 << 20, 1 << 18, 1 << 16)]
    del blocks


def run(x: list[Tensor], backend: str, double: bool, **options: Any) -> list[Tensor]:
    leaves = [(t.double() if double else t).detach().requires_grad_() for t in x]
    poison()
    o = rat_window_attention(*leaves, backend=backend, **options)
    do = torch.randn(o.shape, generator=torch.Generator("cuda").manual_seed(7), device="cuda").to(x[0].dtype)
    return [o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype))]


def compare(x: list[Tensor], **options: Any) -> None:
    expected, ours = run(x, "chunked", True, **options), run(x, "triton", False, **options)
    names = ("o", "q", "k", "v", "keys", "values", "offset")
    errors = {
        # Of a lone key, gradients of q and k are 0, and what stays of the terms that cancel is relative to those.
        name: float((a.double() - b).norm() / b.norm().clamp_min(1.0))
        for name, a, b in zip(names, ours, expected, strict=True)
    }
    errors["offset"] /= 5  # a sum over all queries, in which errors stay and values cancel
    assert all(error <= TOLERANCE[x[0].dtype] for error in errors.values()), errors


@DTYPES
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_windows_and_places(heads, dtype):
    for T in (1, 130, 1500):
        for window, chunk in ((64, 16), (0, 16), (100, 4)):
            compare(draw(T, T, chunk, T, heads, 64, dtype), window=window, chunk_size=chunk)
    padded = torch.tensor([0, 201], device="cuda")
    compare(draw(700, 700, 16, 700, heads, 64, dtype), window=64, chunk_size=16, origin=padded)
    later = torch.tensor([78 - 1000, 78 - 333], device="cuda")
    x = draw(300, 378, 16, 1300, heads, 64, dtype)
    compare(x, window=64, chunk_size=16, origin=later, reach=500, softcap=5.0)


@pytest.mark.parametrize("K", [16, 80, 128, 256])
def test_widths(K):
    compare(draw(900, 900, 16, 900, (4, 2), K, torch.bfloat16), window=64, chunk_size=16)


def test_gradients_repeat_and_nothing_waits():
    x = draw(1000, 1000, 16, 1000, (8, 2), 64, torch.bfloat16)
    options: dict[str, Any] = {"window": 64, "chunk_size": 16, "origin": torch.tensor([0, 5], device="cuda")}
    first, second = (run(x, "triton", False, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    leaves = [t.requires_grad_() for t in x]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(rat_window_attention(*leaves, **options).float().sum(), leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@DTYPES
@pytest.mark.parametrize(("window", "reach", "softcap"), [(64, None, None), (0, None, 5.0), (40, 200, None)])
def test_steps_in_a_cuda_graph(window, reach, softcap, dtype):
    """Replays, each row from a place of its own, are the whole at once."""
    q, k, v, keys, values, offset = draw(300, 300, 16, 300, (8, 2), 128, dtype)
    options: dict[str, Any] = {"window": window, "chunk_size": 16, "reach": reach, "softcap": softcap}
    whole = rat_window_attention(q, k, v, keys, values, offset, **options).float()
    slots, rows, start = window + 15, torch.arange(2, device="cuda"), torch.tensor([0, 210], device="cuda")
    ring = (k.new_zeros(2, slots, 2, 128), v.new_zeros(2, slots, 2, 128)) if window else None
    for t in range(210):
        for slot, x in zip(ring or (), (k, v), strict=False):
            slot[1, t % slots] = x[1, t]
    token, position = [x[:, 0].clone() for x in (q, k, v)], start.clone()
    spare = None if ring is None else (ring[0].clone(), ring[1].clone())
    rat_window_attention_step(*token, keys, values, offset, spare, position, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = rat_window_attention_step(*token, keys, values, offset, ring, position, **options)
    for n in range(90):
        position.copy_(start + n)
        for place, x in zip(token, (q, k, v), strict=True):
            place.copy_(x[rows, start + n])
        graph.replay()
        expected = whole[rows, start + n]
        assert (o.float() - expected).norm() <= TOLERANCE[dtype] * expected.norm(), n


@pytest.mark.parametrize(("chunk", "position"), [(16, [5, 32]), (128, [70, 0])])
def test_scans_of_rows_at_places_of_their_own(chunk, position):
    generator = torch.Generator("cuda").manual_seed(0)
    x, gate = (torch.randn(2, 500, n, 64, generator=generator, device="cuda") for n in (4, 2))
    start = torch.randn(2, 4, 64, generator=generator, device="cuda")
    results = []
    for backend, dtype in (("triton", torch.float32), ("chunked", torch.float64)):
        leaves = [t.to(dtype).detach().requires_grad_() for t in (x, gate.sigmoid(), start)]
        y, end = gated_scan(
            *leaves[:2], chunk, position=torch.tensor(position, device="cuda"), initial_state=leaves[2],
            output_final_state=True, backend=backend,
        )  # fmt: skip
        assert end is not None
        results.append([y, end, *torch.autograd.grad(y.square().sum() + end.square().sum(), leaves)])
    for ours, expected in zip(*results, strict=True):
        assert (ours.double() - expected).norm() <= 1e-5 * expected.norm()
