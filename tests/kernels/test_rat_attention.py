"""RAT attention: blocks, the cache, steps and the Triton kernels against the float64 loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels.dispatch import triton_interpreted
from linearize.kernels.rat_attention import RatCache, rat_attention, rat_attention_step
from tests.kernels.test_gated_scan import assert_close, interpreted, relative_rms, run_interpreted

TOLERANCE = 1e-5
HEADS = [(1, 1, 1, 1), (4, 4, 4, 4), (4, 2, 4, 4), (4, 2, 2, 2), (4, 1, 4, 2), (6, 2, 3, 1)]
many = settings(max_examples=30, deadline=None, derandomize=True)
few = settings(max_examples=10, deadline=None, derandomize=True)


def draw_inputs(
    seed: int, B: int, T: int, heads: tuple[int, int, int, int] = (2, 2, 2, 2), K: int = 8
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("q", "k", "v", "gate")
    x = {name: torch.randn(B, T, H, K, generator=generator) for name, H in zip(names, heads, strict=True)}
    x["gate"] = torch.sigmoid(2 * x["gate"])
    return {name: value.double() for name, value in x.items()}


def tables(chunks: int, R: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(chunks).double()[:, None] * 10.0 ** -torch.arange(R // 2).double()
    angle = torch.cat([angle, angle], dim=1)
    return angle.cos(), angle.sin()


def cache_tensors(cache: RatCache) -> dict[str, Tensor]:
    """What a cache holds; slots from the current chunk on are spare room."""
    assert cache.keys is not None and cache.values is not None and cache.position is not None
    assert cache.running_key is not None and cache.running_value is not None
    n = cache.length // cache.chunk_size
    finished = (torch.arange(n) < cache.position[:, None] // cache.chunk_size)[:, None, :, None]
    slots = {"keys": cache.keys[:, :, :n] * finished, "values": cache.values[:, :, :n] * finished}
    return {**slots, "running_key": cache.running_key, "running_value": cache.running_value}


def run(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, cut: int | None = None, **options: Any):
    """Outputs, what a cache then holds, and all gradients; in two calls if `cut`."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    results: dict[str, Tensor] = {}
    T = inputs["q"].shape[1]
    if cut is None:
        results["o"] = rat_attention(**leaves, backend=backend, **options)
    else:
        cache = RatCache(options["chunk_size"])
        mask = options.pop("key_mask", None)
        parts = []
        for here in (slice(0, cut), slice(cut, T)):
            if mask is not None:
                options["key_mask"] = mask[:, here]
            part = {name: x[:, here] for name, x in leaves.items()}
            parts.append(rat_attention(**part, cache=cache, backend=backend, **options))
        results = {"o": torch.cat(parts, 1), **cache_tensors(cache)}
    assert results["o"].dtype == dtype
    generator = torch.Generator().manual_seed(7)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum() for x in results.values())
    if not (torch.is_tensor(loss) and loss.requires_grad):  # no real token at all
        loss = sum(x.sum() * 0 for x in leaves.values())
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {**results, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


def mask_of(padding: str | None, B: int, T: int, seed: int) -> Tensor | None:
    if padding is None:
        return None
    if padding == "left":
        return torch.arange(T) >= torch.arange(B)[:, None] * (T // 3 + 1)
    if padding == "right":
        return torch.arange(T) < T - torch.arange(B)[:, None] * (T // 3 + 1)
    return torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < 0.6


@many
@given(
    seed=st.integers(0, 2**31),
    T=st.sampled_from([0, 1, 2, 7, 16, 17, 33]),
    heads=st.sampled_from(HEADS),
    chunk_size=st.sampled_from([1, 2, 4, 16, 64]),
    R=st.sampled_from([None, 4, 8]),
    padding=st.sampled_from([None, None, "left", "random"]),
    scale=st.sampled_from([None, 0.7]),
)
def test_blocks_are_the_loop(seed, T, heads, chunk_size, R, padding, scale):
    inputs = draw_inputs(seed, 2, T, heads)
    options = {
        "chunk_size": chunk_size,
        "position_embeddings": None if R is None else tables(40, R),
        "key_mask": mask_of(padding, 2, T, seed),
        "scale": scale,
    }
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float32, "chunked", **options), reference)
    assert_close(run(inputs, torch.float64, "chunked", **options), reference, 1e-12)


@pytest.mark.parametrize("chunk_size", [1, 16])
def test_several_blocks_of_queries(monkeypatch, chunk_size):
    from linearize.kernels.rat_attention import chunked

    monkeypatch.setattr(chunked, "BLOCK", 24)
    inputs = draw_inputs(0, 2, 70, (2, 1, 2, 2))
    options = {"chunk_size": chunk_size, "position_embeddings": tables(70, 8)}
    for cut in (None, 29):
        reference = run(inputs, torch.float64, "reference", cut, **options)
        assert_close(run(inputs, torch.float32, "chunked", cut, **options), reference)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_chunks_of_one_are_softmax_attention(backend):
    """Against torch's own attention and a rotation written by hand, on every token's own position."""
    x = draw_inputs(1, 2, 20, (4, 2, 2, 2))
    x["gate"] = torch.zeros_like(x["gate"])
    cos, sin = tables(20, 8)

    def turned(t: Tensor) -> Tensor:
        low, high = t.transpose(1, 2).chunk(2, dim=-1)
        c, s = cos[:, :4], sin[:, :4]
        return torch.cat([low * c - high * s, high * c + low * s], dim=-1)

    expected = F.scaled_dot_product_attention(
        turned(x["q"]), turned(x["k"]), x["v"].transpose(1, 2), is_causal=True, enable_gqa=True
    )
    o = rat_attention(**x, chunk_size=1, position_embeddings=(cos, sin), backend=backend)
    assert relative_rms(o, expected.transpose(1, 2)) < 1e-12


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_one_long_chunk_is_the_running_mean(backend):
    """With T <= chunk_size a token sees nothing but its own pair."""
    x = draw_inputs(2, 1, 10)
    state = torch.zeros(2, 8, dtype=torch.float64)
    o = rat_attention(**x, chunk_size=16, backend=backend)
    for t in range(10):
        state = x["gate"][0, t] * state + (1 - x["gate"][0, t]) * x["v"][0, t]
        assert relative_rms(o[0, t], state) < 1e-12


@few
@given(
    seed=st.integers(0, 2**31),
    cut=st.integers(0, 21),
    heads=st.sampled_from(HEADS),
    chunk_size=st.sampled_from([1, 2, 4, 8]),
    padding=st.sampled_from([None, "left", "right", "random"]),
)
@example(seed=0, cut=10, heads=HEADS[2], chunk_size=4, padding="right")  # rows of nothing but padding
def test_split_with_a_cache_is_the_whole(seed, cut, heads, chunk_size, padding):
    """Outputs, cache and gradients, which flow through the cache."""
    inputs = draw_inputs(seed, 3, 21, heads)
    options = {
        "chunk_size": chunk_size,
        "position_embeddings": tables(21, 8),
        "key_mask": mask_of(padding, 3, 21, seed),
    }
    ours = run(inputs, torch.float32, "chunked", cut, **options)
    assert_close(ours, run(inputs, torch.float64, "reference", cut, **options))
    assert_close(ours, run(inputs, torch.float64, "reference", 21, **options))
    whole = rat_attention(**inputs, **options, backend="reference")
    assert relative_rms(ours["o"], whole) < TOLERANCE


@few
@given(
    seed=st.integers(0, 2**31),
    prefill=st.sampled_from([0, 1, 5, 16]),
    heads=st.sampled_from(HEADS),
    chunk_size=st.sampled_from([1, 2, 4, 16]),
    padded=st.booleans(),
    reserved=st.booleans(),
)
def test_token_by_token_is_parallel(seed, prefill, heads, chunk_size, padded, reserved):
    x = draw_inputs(seed, 2, 36, heads)
    # Row 1 lacks the first three tokens: its chunk grid starts where it does.
    first = 3 if padded and prefill >= 5 else 0
    mask = torch.arange(36) >= torch.tensor([[0], [first]])
    options = {"position_embeddings": tables(40, 4)}
    whole = rat_attention(**x, chunk_size=chunk_size, key_mask=mask, backend="reference", **options)
    cache = RatCache(chunk_size)
    x = {name: value.float() for name, value in x.items()}
    if prefill > 0:
        part = {name: value[:, :prefill] for name, value in x.items()}
        rat_attention(**part, chunk_size=chunk_size, cache=cache, key_mask=mask[:, :prefill], **options)
    address = None
    if reserved and prefill > 0:
        cache.reserve(36)
        address = cache.keys.data_ptr()
    for t in range(prefill, 36):
        o = rat_attention_step(*(value[:, t] for value in x.values()), cache, **options)
        assert relative_rms(o, whole[:, t]) < TOLERANCE
    assert (cache.length, cache.position.tolist()) == (36, [36, 36 - first])
    if address is not None:
        assert cache.keys.data_ptr() == address
        if chunk_size == 1:
            with pytest.raises(ValueError, match="36 tokens"):
                rat_attention_step(*(value[:, 0] for value in x.values()), cache, **options)


def test_prefill_after_steps_goes_on():
    """Room that steps made must not be taken for chunks."""
    x = {name: value.float() for name, value in draw_inputs(4, 2, 60).items()}
    whole = rat_attention(**x, chunk_size=4)
    cache, parts = RatCache(4), []
    for start, end in ((0, 1), (1, 2), (2, 3), (3, 30), (30, 31), (31, 60)):
        part = {name: value[:, start:end] for name, value in x.items()}
        if end - start == 1:
            parts.append(rat_attention_step(*(value[:, 0] for value in part.values()), cache)[:, None])
        else:
            parts.append(rat_attention(**part, chunk_size=4, cache=cache))
    assert relative_rms(torch.cat(parts, 1), whole) < TOLERANCE


def test_rows_of_a_cache():
    x = {name: value.float() for name, value in draw_inputs(5, 3, 10).items()}
    cache = RatCache(4)
    rat_attention(**{name: value[:, :9] for name, value in x.items()}, chunk_size=4, cache=cache)
    index, token = torch.tensor([2, 0, 2]), [value[:, 9] for value in x.values()]
    chosen = cache.rows(index)
    expected = rat_attention_step(*token, cache)[index]
    assert relative_rms(rat_attention_step(*(value[index] for value in token), chosen), expected) < 1e-6


@few
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.sampled_from([0, 0, 1, 2, 7, 17, 30]), min_size=1, max_size=6),
    chunk_size=st.sampled_from([1, 4, 16]),
)
def test_packed_is_separate(seed, lengths, chunk_size):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs = draw_inputs(seed, 1, sum(lengths), (4, 2, 4, 4))
    options = {"chunk_size": chunk_size, "position_embeddings": tables(120, 8)}
    ours = run(inputs, torch.float32, "chunked", cu_seqlens=bounds, **options)
    assert_close(ours, run(inputs, torch.float64, "reference", cu_seqlens=bounds, **options))
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        alone = {name: value[:, start:end] for name, value in inputs.items()}
        assert relative_rms(ours["o"][:, start:end], rat_attention(**alone, **options)) < TOLERANCE


@pytest.mark.parametrize("chunk_size", [1, 4, 16])
def test_left_padded_is_unpadded(chunk_size):
    x = draw_inputs(6, 1, 30)
    options = {"chunk_size": chunk_size, "position_embeddings": tables(40, 8)}
    alone = rat_attention(**x, **options)
    padded = {name: F.pad(value, (0, 0, 0, 0, 5, 0), value=1.0) for name, value in x.items()}
    padded["v"][:, :5] = float("nan")
    mask = (torch.arange(35) >= 5)[None]
    for backend in ("chunked", "reference"):
        o = rat_attention(**padded, key_mask=mask, backend=backend, **options)
        assert relative_rms(o[:, 5:], alone) < 1e-12
        assert (o[:, :5] == 0).all()


def test_strided_and_half():
    x = draw_inputs(7, 2, 33, K=16)
    options = {"chunk_size": 4, "position_embeddings": tables(20, 8)}
    scattered = {name: value.transpose(1, 2).contiguous().transpose(1, 2) for name, value in x.items()}
    assert_close(run(scattered, torch.float32, "chunked", **options), run(x, torch.float64, "reference", **options))
    half = {name: value.bfloat16() for name, value in x.items()}
    o = rat_attention(**half, **options)
    reference = rat_attention(**{name: value.double() for name, value in half.items()}, **options, backend="reference")
    assert o.dtype == torch.bfloat16
    assert relative_rms(o, reference) < torch.finfo(torch.bfloat16).eps
    cache = RatCache(4)
    rat_attention(**{name: value[:, :32] for name, value in half.items()}, **options, cache=cache)
    assert cache.keys.dtype == torch.bfloat16
    assert cache.running_key.dtype == torch.float32
    last = rat_attention_step(*(value[:, 32] for value in half.values()), cache, position_embeddings=tables(20, 8))
    assert last.dtype == torch.bfloat16
    assert relative_rms(last, reference[:, 32]) < 2 * torch.finfo(torch.bfloat16).eps


BASE = {name: value.float() for name, value in draw_inputs(0, 2, 9, (4, 2, 4, 4)).items()} | {"chunk_size": 4}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k": torch.zeros(2, 9, 3, 8)}, ValueError, ["k has 3 heads"]),
        ({"gate": torch.full((2, 9, 3, 8), 0.5)}, ValueError, ["gate has 3 heads"]),
        ({"gate": torch.full((2, 9, 4, 8), 1.5)}, ValueError, ["gate", "1.5"]),
        ({"v": torch.zeros(2, 9, 4, 6)}, ValueError, ["v", "K=8"]),
        ({"chunk_size": 6}, ValueError, ["chunk_size", "6", "power of two"]),
        ({"chunk_size": None}, ValueError, ["chunk_size", "None"]),
        ({"key_mask": torch.ones(2, 9)}, TypeError, ["key_mask", "bool"]),
        ({"position_embeddings": tables(2, 8)}, ValueError, ["position_embeddings", "2 rows", "3 chunks"]),
        ({"position_embeddings": tables(9, 10)}, ValueError, ["position_embeddings", "K=8"]),
        ({"position_embeddings": torch.zeros(9, 8)}, TypeError, ["position_embeddings", "cos"]),
        ({"cache": {}}, TypeError, ["cache", "RatCache"]),
        ({"cache": RatCache(8)}, ValueError, ["chunk_size is 4", "8"]),
        ({"cu_seqlens": torch.tensor([0, 9])}, ValueError, ["batch must be 1"]),
        ({"backend": "fast"}, ValueError, ["backend", "fast"]),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        rat_attention(**{**BASE, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cache_of_another_batch_is_named():
    cache = RatCache(4)
    rat_attention(**BASE, cache=cache)
    with pytest.raises(ValueError, match="cache holds keys"):
        rat_attention(**{name: x[:1] if isinstance(x, Tensor) else x for name, x in BASE.items()}, cache=cache)
    with pytest.raises(ValueError, match="empty"):
        RatCache(4).reserve(10)


@interpreted
@pytest.mark.parametrize(
    ("T", "heads", "K", "chunk_size", "R", "padding"),
    [
        (1, (1, 1, 1, 1), 16, 4, None, None),
        (33, (1, 1, 1, 1), 16, 1, 16, None),  # softmax attention, if the gates were 0
        (70, (2, 1, 2, 2), 20, 2, 8, None),
        (150, (1, 1, 1, 1), 16, 4, 16, None),  # summaries that all queries of a block see
        (70, (4, 1, 2, 2), 16, 16, None, "left"),
        (40, (6, 2, 3, 1), 16, 4, 4, "random"),
        (40, (6, 2, 3, 3), 16, 8, 4, None),
        (20, (2, 2, 2, 2), 16, 64, 16, None),  # no chunk is ever finished
    ],
)
def test_interpreted_kernels_are_the_loop(T, heads, K, chunk_size, R, padding):
    inputs = draw_inputs(0, 2, T, heads, K)
    options = {
        "chunk_size": chunk_size,
        "position_embeddings": None if R is None else tables(80, R),
        "key_mask": mask_of(padding, 2, T, 3),
    }
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float32, "triton", **options), reference)


@interpreted
def test_interpreted_kernels_in_float16():
    """At most twice the error of plain torch in that dtype, for the output and each gradient."""
    inputs = {name: value.half().double() for name, value in draw_inputs(1, 1, 70, (2, 2, 2, 2), 16).items()}
    options = {"chunk_size": 4, "position_embeddings": tables(20, 16)}
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float16, "triton", **options), reference, 2e-3)


@interpreted
def test_interpreted_packed_strided_and_cached():
    x = draw_inputs(2, 1, 40, (2, 1, 2, 2), 16)
    options = {"chunk_size": 4, "position_embeddings": tables(20, 8)}
    bounds = torch.tensor([0, 0, 3, 23, 40])
    reference = run(x, torch.float64, "reference", cu_seqlens=bounds, **options)
    assert_close(run(x, torch.float32, "triton", cu_seqlens=bounds, **options), reference)
    scattered = {name: value.transpose(1, 2).contiguous().transpose(1, 2) for name, value in x.items()}
    reference = run(x, torch.float64, "reference", 40, **options)
    leaves = {name: value.float() for name, value in scattered.items()}
    empty = {name: value[:, :0] for name, value in leaves.items()}
    assert rat_attention(**empty, backend="triton", **options).shape == (1, 0, 2, 16)
    cache = RatCache(4)
    o = rat_attention(
        **{name: value[:, :39] for name, value in leaves.items()}, cache=cache, backend="triton", **options
    )
    last = rat_attention_step(*(value[:, 39] for value in leaves.values()), cache, position_embeddings=tables(20, 8))
    ours = {"o": torch.cat([o, last[:, None]], 1), **cache_tensors(cache)}
    assert_close(ours, {name: reference[name] for name in ours})
    with pytest.raises(RuntimeError, match="without gradients"):
        wanted = {name: value.requires_grad_() for name, value in leaves.items()}
        rat_attention(**wanted, cache=cache, backend="triton", **options)


@interpreted
@pytest.mark.parametrize(
    ("T", "heads", "R"),
    [(70, (2, 2, 2, 2), 16), (67, (2, 1, 4, 4), 8), (64, (6, 2, 3, 3), None), (9, (1, 1, 1, 1), 16)],
)
def test_interpreted_attention_over_many_summaries(monkeypatch, T, heads, R):
    """Through torch's own attention."""
    from linearize.kernels.rat_attention import dense, launch

    kernels = []
    monkeypatch.setattr(launch, "DENSE_FROM", 2)
    monkeypatch.setattr(dense, "_forward", lambda *x, run=dense._forward: kernels.append(x[0]) or run(*x))
    inputs = {name: value.half().double() for name, value in draw_inputs(1, 2, T, heads, 16).items()}
    options = {"chunk_size": 4, "position_embeddings": None if R is None else tables(20, R)}
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float16, "triton", **options), reference, 2e-3)
    assert kernels == ["cpu"]


@interpreted
def test_interpreted_gate_logits():
    """Also with fewer query heads than running pairs."""
    x = draw_inputs(4, 2, 20, (2, 1, 4, 4), 16)
    logits = {**x, "gate": torch.logit(x["gate"])}
    options = {"chunk_size": 4, "position_embeddings": tables(20, 16)}
    wide = {name: value.requires_grad_() for name, value in logits.items()}
    expected = rat_attention(**{**wide, "gate": wide["gate"].sigmoid()}, **options, backend="reference")
    reference = torch.autograd.grad(expected.square().sum(), list(wide.values()))
    for backend in ("triton", "chunked"):
        leaves = {name: value.detach().float().requires_grad_() for name, value in logits.items()}
        o = rat_attention(**leaves, **options, sigmoid_gate=True, backend=backend)
        assert relative_rms(o, expected) < TOLERANCE
        gradients = torch.autograd.grad(o.square().sum(), list(leaves.values()))
        assert all(relative_rms(a, b) < TOLERANCE for a, b in zip(gradients, reference, strict=True))


@interpreted
@pytest.mark.parametrize(
    ("heads", "R", "programs"),
    [((2, 2, 2, 2), 16, 1), ((4, 2, 2, 2), 8, 64), ((2, 1, 4, 4), None, 1), ((1, 1, 1, 1), 4, 64)],
)
def test_interpreted_steps_and_prefill_from_a_cache(monkeypatch, heads, R, programs):
    """Token by token, and parts of any length, rows standing at different places of their chunks."""
    from linearize.kernels.rat_attention import launch

    monkeypatch.setattr(launch, "STEP_PROGRAMS", programs)
    monkeypatch.setitem(launch.TABLE, "step", launch.Launch(4, 1, 1, 1))
    x = draw_inputs(5, 2, 60, heads, 16)
    options = {"position_embeddings": None if R is None else tables(40, R)}
    mask = torch.arange(60) >= torch.tensor([[0], [3]])
    whole = rat_attention(**x, chunk_size=4, key_mask=mask, backend="reference", **options)
    x = {name: value.float() for name, value in x.items()}
    logits = {**x, "gate": torch.logit(x["gate"])}
    cache = RatCache(4)
    begin = {name: value[:, :6] for name, value in x.items()}
    rat_attention(**begin, chunk_size=4, cache=cache, key_mask=mask[:, :6], **options)
    at = 6
    for length in (1, 1, 7, 1, 1, 1, 20, 1, 1, 1, 1, 1):
        part = {name: value[:, at : at + length] for name, value in (logits if length == 1 else x).items()}
        if length == 1:
            token = [value[:, 0] for value in part.values()]
            o = rat_attention_step(*token, cache, sigmoid_gate=True, backend="triton", **options)[:, None]
        else:
            o = rat_attention(**part, chunk_size=4, cache=cache, backend="triton", **options)
        assert relative_rms(o, whole[:, at : at + length]) < TOLERANCE, at
        at += length
    assert (cache.length, cache.position.tolist()) == (at, [at, at - 3])
    cache.keys, cache.values = (
        torch.where(torch.arange(cache.slots)[:, None] < (at - 3) // 4, t, float("nan"))
        for t in (cache.keys, cache.values)
    )
    o = rat_attention_step(
        *(value[1:, at] for value in x.values()), cache.rows(torch.tensor([1])), backend="triton", **options
    )
    assert relative_rms(o, whole[1:, at]) < TOLERANCE  # nothing behind the finished chunks is read


@interpreted
def test_interpreted_operators_are_sound():
    from linearize.kernels.rat_attention import triton_path

    x = {name: value.float().requires_grad_() for name, value in draw_inputs(3, 1, 20, (2, 1, 2, 2), 16).items()}
    cos, sin = (table.float() for table in tables(20, 8))
    torch.library.opcheck(triton_path._forward_op, (*x.values(), cos, sin, 4, 0.25, False, True))

    def loss(*inputs: Tensor) -> Tensor:
        o = rat_attention(*inputs, chunk_size=4, position_embeddings=(cos, sin), backend="triton")
        return o.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaves = list(x.values())
    gradients = torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(loss(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.skipif(triton_interpreted(), reason="already there")
def test_triton_kernels_in_the_interpreter():
    run_interpreted(__file__)
