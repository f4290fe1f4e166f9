"""RAT attention's Triton kernels on a real GPU, in float32, float16 and bfloat16."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from linearize.kernels.rat_attention import RatCache, launch, rat_attention, rat_attention_step

triton_path = pytest.importorskip("linearize.kernels.rat_attention.triton_path")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HEADS = (2, 2, 2, 2)
# Against float64 on the same inputs. In 16 bits running pairs, turned queries, summaries and probabilities are rounded.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.5e-3, torch.bfloat16: 1.6e-2}


def draw(
    B: int, T: int, K: int, dtype: torch.dtype, heads: tuple[int, int, int, int] = HEADS, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    names = ("q", "k", "v", "gate")
    x = {
        name: torch.randn(B, T, H, K, generator=generator, device="cuda") for name, H in zip(names, heads, strict=True)
    }
    x["gate"] = torch.sigmoid(2 * x["gate"])
    return {name: value.to(dtype) for name, value in x.items()}


def tables(chunks: int, R: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(chunks, device="cuda")[:, None] * 100.0 ** (-torch.arange(R // 2, device="cuda") / R)
    angle = torch.cat([angle, angle], dim=1)
    return angle.cos(), angle.sin()


def options(T: int, C: int, R: int | None) -> dict[str, Any]:
    return {"chunk_size": C, "position_embeddings": None if R is None else tables(T // C + 1, R)}


def poison() -> None:
    """Fill what the allocator will hand out next with NaN: outputs and workspaces must be written in full."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 26, 1 << 22, 1 << 20, 1 << 18, 1 << 16)]
    del blocks


def run(inputs: dict[str, Tensor], backend: str, double: bool = False, **options: Any) -> dict[str, Tensor]:
    leaves = {name: (x.double() if double else x).detach().requires_grad_() for name, x in inputs.items()}
    if not double:
        poison()
    o = rat_attention(**leaves, backend=backend, **options)
    return gradients(o, leaves, inputs["q"].dtype)


def gradients(o: Tensor, leaves: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    do = torch.randn(o.shape, generator=torch.Generator("cuda").manual_seed(7), device="cuda").to(dtype).to(o.dtype)
    found = torch.autograd.grad((o * do).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(leaves, found, strict=True)}}


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
    # The chunked form in float64 is the loop to 1e-12 (tests/kernels) and much faster.
    found = errors(run(inputs, "triton", **options), run(inputs, "chunked", double=True, **options))
    assert all(error <= TOLERANCE[inputs["q"].dtype] for error in found.values()), found


@pytest.mark.parametrize(
    ("T", "dtype"),
    [(T, torch.bfloat16) for T in (1, 2, 15, 63, 64, 65, 1000, 2048)]
    + [(T, torch.float16) for T in (65, 1000)]
    + [(T, torch.float32) for T in (63, 1000)],
    ids=str,
)
def test_lengths(T, dtype):
    K = 32 if dtype == torch.float32 else 64  # float32 products compile slowly
    compare(draw(2, T, K, dtype), **options(T, 16, K))


@pytest.mark.parametrize(
    ("K", "C", "R", "heads", "dtype"),
    [
        (16, 4, 16, HEADS, torch.bfloat16),
        (60, 1, None, (4, 1, 2, 2), torch.bfloat16),
        (100, 64, 40, HEADS, torch.bfloat16),
        (128, 16, 128, (2, 2, 16, 16), torch.bfloat16),  # q and k shared by groups, as in the paper
        (128, 16, 128, (8, 2, 2, 2), torch.bfloat16),  # a converted model with grouped keys and values
        (128, 2, 128, (6, 2, 3, 1), torch.float16),
        (256, 16, 256, HEADS, torch.bfloat16),
        (32, 16, 16, (4, 1, 4, 2), torch.float32),
    ],
    ids=str,
)
def test_widths_heads_and_chunks(K, C, R, heads, dtype):
    compare(draw(1, 300, K, dtype, heads), **options(300, C, R))


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize(
    ("T", "heads", "dtype"),
    [(1000, HEADS, torch.bfloat16), (1024, (2, 2, 4, 4), torch.bfloat16), (1024, (4, 2, 2, 2), torch.float16)],
    ids=str,
)
def test_torch_attention_over_the_summaries(monkeypatch, kernel, T, heads, dtype):
    monkeypatch.setattr(triton_path, "dense_kernel", lambda *_: kernel)
    compare(draw(2, T, 128, dtype, heads), **options(T, 16, 128))


def test_which_attention_takes_long_sequences(monkeypatch):
    q = torch.empty(1, 16 * launch.DENSE_FROM, 16, 128, device="cuda", dtype=torch.bfloat16)
    assert triton_path.dense_kernel(q, 16) in ("cudnn", "flash")
    assert triton_path.dense_kernel(q[:, 16:], 16) is None
    assert triton_path.dense_kernel(q.float(), 16) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert triton_path.dense_kernel(q, 16) is None


def plain(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, C: int) -> Tensor:
    """Every step in the inputs' dtype; T must be a multiple of C, and all have as many heads."""
    B, T, H, K = q.shape

    def mean(x: Tensor) -> Tensor:
        state, steps = torch.zeros_like(x[:, ::C]), []
        for i in range(C):
            g = gate[:, i::C]
            state = g * state + (1 - g) * x[:, i::C]
            steps.append(state)
        return torch.stack(steps, 2).view(B, T, H, K)

    own_k, own_v = mean(k), mean(v)
    keys, values, queries = (x.transpose(1, 2) for x in (own_k[:, C - 1 :: C], own_v[:, C - 1 :: C], q))
    chunk = torch.arange(T, device="cuda") // C
    hidden = torch.arange(T // C, device="cuda") >= chunk[:, None]
    s = (queries @ keys.mT * K**-0.5).masked_fill(hidden, float("-inf"))
    own = (queries * own_k.transpose(1, 2)).sum(-1, keepdim=True) * K**-0.5
    p = torch.cat([s, own], -1).softmax(-1)
    return (p[..., :-1] @ values + p[..., -1:] * own_v.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [None, "cudnn"])
def test_at_most_twice_the_error_of_plain_torch(monkeypatch, kernel, dtype):
    monkeypatch.setattr(triton_path, "dense_kernel", lambda *_: kernel)
    x = draw(2, 1024, 64, dtype)
    reference = run(x, "chunked", double=True, chunk_size=16)
    ours = errors(run(x, "triton", chunk_size=16), reference)
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    theirs = errors(gradients(plain(*leaves.values(), 16), leaves, dtype), reference)
    assert all(ours[name] <= 2 * theirs[name] for name in theirs), (ours, theirs)


def test_padded_and_packed():
    x = draw(3, 300, 64, torch.bfloat16)
    mask = torch.rand(3, 300, generator=torch.Generator("cuda").manual_seed(1), device="cuda") < 0.7
    compare(x, key_mask=mask, **options(300, 16, 64))
    x = {name: value[:1] for name, value in x.items()}
    bounds = torch.tensor([0, 0, 1, 64, 64, 129, 130, 300], device="cuda")
    compare(x, cu_seqlens=bounds, **options(300, 16, 64))


def test_strided_inputs_and_gate_logits():
    x = draw(2, 200, 64, torch.bfloat16)
    packed = torch.stack([x["q"], x["k"], x["v"]], 2)
    x["q"], x["k"] = packed[:, :, 0], packed[:, :, 1]
    x["v"] = x["v"].transpose(1, 2).contiguous().transpose(1, 2)
    compare(x, **options(200, 16, 64))
    x["gate"] = torch.randn_like(x["gate"])
    compare(x, **options(200, 16, 64), sigmoid_gate=True)


@pytest.mark.parametrize(
    ("B", "heads", "prefill", "dtype"),
    [
        (2, (2, 2, 16, 16), 40, torch.bfloat16),
        (1, (8, 2, 2, 2), 2000, torch.bfloat16),  # parts of the slots, joined
        (300, HEADS, 40, torch.float32),
    ],
    ids=str,
)
def test_cached_decoding_is_parallel(B, heads, prefill, dtype):
    """A prefill, steps, more tokens at once, steps."""
    T, cuts = prefill + 60, (prefill, prefill + 20, prefill + 41)
    K = 32 if dtype == torch.float32 else 128
    x = draw(B, T, K, dtype, heads)
    shared = options(T, 16, K)
    whole = rat_attention(**{name: value.double() for name, value in x.items()}, **shared)
    cache, parts = RatCache(16), []
    with torch.no_grad():
        for begin, end, at_once in ((0, cuts[0], 1), (*cuts[:2], 0), (*cuts[1:], 1), (cuts[2], T, 0)):
            poison()
            if at_once:
                part = {name: value[:, begin:end] for name, value in x.items()}
                parts.append(rat_attention(**part, cache=cache, backend="triton", **shared))
            for t in range(begin, end) if not at_once else ():
                token = (value[:, t] for value in x.values())
                tables = shared["position_embeddings"]
                o = rat_attention_step(*token, cache, position_embeddings=tables, backend="triton")
                parts.append(o[:, None])
    found = errors({"o": torch.cat(parts, 1)}, {"o": whole})
    assert found["o"] <= TOLERANCE[dtype], found
    assert (cache.length, cache.position.tolist()) == (T, [T] * B)


@pytest.mark.parametrize("kernel", [None, "cudnn"])
def test_cuda_graph(monkeypatch, kernel):
    monkeypatch.setattr(triton_path, "dense_kernel", lambda *_: kernel)
    x = draw(1, 512, 64, torch.bfloat16)
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    do = torch.randn_like(x["v"])
    shared = options(512, 16, 64)

    def both() -> tuple[Tensor, ...]:
        o = rat_attention(**leaves, **shared)
        return (o, *torch.autograd.grad(o, list(leaves.values()), do))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        both()
        expected = [t.clone() for t in both()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for t in captured:
        t.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for ours, t in zip(captured, expected, strict=True):
        if kernel is None:
            assert torch.equal(ours, t)
        else:  # cuDNN adds in any order
            assert (ours - t).float().norm() <= 1e-2 * t.float().norm()


def test_cuda_graph_of_a_step():
    x = draw(2, 80, 64, torch.bfloat16)
    shared = options(80, 16, 64)
    whole = rat_attention(**{name: value.double() for name, value in x.items()}, **shared)
    cache = RatCache(16)
    with torch.no_grad():
        rat_attention(**{name: value[:, :20] for name, value in x.items()}, cache=cache, **shared)
    cache.reserve(80)
    token = [value[:, 20].clone() for value in x.values()]
    tables = shared["position_embeddings"]
    rat_attention_step(*token, cache, position_embeddings=tables)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = rat_attention_step(*token, cache, position_embeddings=tables)
    for t in range(21, 80):
        for buffer, value in zip(token, x.values(), strict=True):
            buffer.copy_(value[:, t])
        graph.replay()
        assert (o.double() - whole[:, t]).norm() <= 1.6e-2 * whole[:, t].norm(), t


@pytest.mark.parametrize("kernel", [None, "cudnn"])
def test_compile_checkpoint_autocast(monkeypatch, kernel):
    monkeypatch.setattr(triton_path, "dense_kernel", lambda *_: kernel)
    x = draw(1, 512, 64, torch.bfloat16)
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    shared = options(512, 16, 64)

    def loss(*inputs: Tensor) -> Tensor:
        return rat_attention(*inputs, **shared).float().square().sum()

    expected = torch.autograd.grad(loss(*leaves.values()), list(leaves.values()))
    compiled = torch.compile(loss, fullgraph=True)
    ways = [
        compiled(*leaves.values()),
        torch.utils.checkpoint.checkpoint(loss, *leaves.values(), use_reentrant=False),
    ]
    with torch.autocast("cuda", torch.bfloat16):
        ways.append(loss(*(value.float() if name in ("q", "k") else value for name, value in leaves.items())))
    for way in ways:
        for ours, t in zip(torch.autograd.grad(way, list(leaves.values())), expected, strict=True):
            assert (ours - t).float().norm() <= 1e-2 * t.float().norm()


def test_compiled_step_and_operators():
    x = draw(2, 40, 64, torch.bfloat16)
    shared = options(40, 16, 64)
    cos, sin = shared["position_embeddings"]
    leaves = [value.detach().requires_grad_() for value in x.values()]
    torch.library.opcheck(triton_path._forward_op, (*leaves, cos, sin, 16, 0.125, False, True))
    caches = [RatCache(16), RatCache(16)]
    outputs = []
    for cache in caches:
        with torch.no_grad():
            rat_attention(**{name: value[:, :39] for name, value in x.items()}, cache=cache, **shared)
        cache.reserve(80)

    def step(cache: RatCache, *token: Tensor) -> Tensor:
        return rat_attention_step(*token, cache, position_embeddings=(cos, sin))

    for cache, way in zip(caches, (step, torch.compile(step)), strict=True):
        outputs.append(way(cache, *(value[:, 39] for value in x.values())))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("kernel", [None, "cudnn"])
def test_no_host_synchronisation(monkeypatch, kernel):
    monkeypatch.setattr(triton_path, "dense_kernel", lambda *_: kernel)
    x = draw(1, 512, 64, torch.bfloat16)
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    shared = options(512, 16, 64)
    rat_attention(**leaves, **shared).sum().backward()  # compiled before it is watched
    torch.cuda.set_sync_debug_mode("error")
    try:
        rat_attention(**leaves, **shared).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_are_equal_bit_for_bit():
    x = draw(2, 500, 64, torch.bfloat16)
    first, second = (run(x, "triton", **options(500, 16, 64)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_more_elements_than_32_bits_count():
    """The last row of a batch whose tensors have more than 2^31 elements, and more programs than 65535."""
    x = draw(1, 64, 128, torch.bfloat16, (16, 16, 16, 16))
    rows = (1 << 31) // (64 * 16 * 128) + 1
    with torch.no_grad():
        many = {name: value.expand(rows, -1, -1, -1) for name, value in x.items()}
        o = rat_attention(**many, **options(64, 16, 128))
        assert torch.equal(o[-1], rat_attention(**x, **options(64, 16, 128))[0])


def test_first_call_takes_seconds(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = draw(1, 256, 128, torch.bfloat16, (7, 7, 7, 7))  # seven heads: shapes no other test has compiled
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    began = time.perf_counter()
    rat_attention(**leaves, **options(256, 16, 128)).sum().backward()
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 20
