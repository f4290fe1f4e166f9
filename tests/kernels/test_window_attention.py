"""Window attention on the CPU: the blocked form against a dense masked softmax in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels.window_attention import window_attention, window_attention_step, window_cache

TOLERANCE = 1e-5


def relative_rms(ours: Tensor, reference: Tensor) -> float:
    assert ours.shape == reference.shape
    ours, reference = ours.detach().double(), reference.detach().double()
    finite = torch.isfinite(reference)
    assert torch.equal(finite, torch.isfinite(ours))
    if reference.numel() == 0:
        return 0.0
    error, size = (ours[finite] - reference[finite]).norm(), reference[finite].norm()
    return float(error / size) if size > 0 else float(error)


def draw_inputs(seed: int, B: int, T: int, S: int, H: int, Hk: int, Hv: int, K: int = 16, V: int = 20):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, T, H, K), "k": (B, S, Hk, K), "v": (B, S, Hv, V)}
    return {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}


def run(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, **options) -> dict[str, Tensor]:
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    o, lse = window_attention(**leaves, return_lse=True, backend=backend, **options)
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=generator).to(o.dtype)
    dlse = torch.randn(lse.shape, generator=generator).to(lse.dtype)
    loss = (o * do).sum() + (torch.where(torch.isfinite(lse), lse, 0) * dlse).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    assert all(torch.isfinite(g).all() for g in gradients)
    return {"o": o, "lse": lse, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


def assert_close(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    errors = {name: relative_rms(ours[name], reference[name]) for name in reference}
    assert all(error <= tolerance for error in errors.values()), errors


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    B=st.integers(1, 3),
    T=st.sampled_from([0, 1, 2, 15, 31, 32, 33, 65, 130]),
    earlier=st.sampled_from([0, 0, 1, 7, 63]),
    heads=st.sampled_from([(1, 1, 1), (4, 4, 4), (4, 2, 2), (6, 1, 3), (4, 1, 1)]),
    window=st.sampled_from([1, 2, 8, 32, 64, 1000]),
    sinks=st.sampled_from([0, 0, 1, 4, 300]),
    softcap=st.sampled_from([None, None, 2.0]),
    padding=st.sampled_from([None, None, "left", "random"]),
)
def test_blocks_are_the_dense_softmax(seed, B, T, earlier, heads, window, sinks, softcap, padding):
    S = T + earlier
    inputs = draw_inputs(seed, B, T, S, *heads)
    key_mask = None
    if padding == "left":
        key_mask = torch.arange(S) >= torch.arange(B)[:, None] * (S // 3)
    elif padding == "random":
        key_mask = torch.rand(B, S, generator=torch.Generator().manual_seed(seed)) < 0.6
    options = {"window": window, "sinks": sinks, "softcap": softcap, "key_mask": key_mask}
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float32, "chunked", **options), reference)
    assert_close(run(inputs, torch.float64, "chunked", **options), reference, 1e-12)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (5, 0), (5, 2), (40, 0)])
def test_against_torch(window, sinks):
    """An implementation that shares nothing with ours, its mask written out by hand."""
    x = draw_inputs(0, 2, 40, 40, 4, 2, 2)
    mask = torch.zeros(40, 40, dtype=torch.bool)
    for i in range(40):
        for j in range(i + 1):
            mask[i, j] = i - j < window or j < sinks
    q, k, v = (t.transpose(1, 2) for t in x.values())
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    for backend in ("chunked", "reference"):
        assert relative_rms(window_attention(**x, window=window, sinks=sinks, backend=backend), dense) < 1e-12


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.sampled_from([0, 1, 2, 17, 30, 70, 100]), min_size=1, max_size=6),
    window=st.sampled_from([1, 8, 64, 1000]),
    sinks=st.sampled_from([0, 3]),
)
def test_packed_is_separate(seed, lengths, window, sinks):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    T = sum(lengths)
    x = draw_inputs(seed, 1, T, T, 4, 2, 2)
    options = {"window": window, "sinks": sinks}
    ours = run(x, torch.float32, "chunked", **options, cu_seqlens=bounds)
    assert_close(ours, run(x, torch.float64, "reference", **options, cu_seqlens=bounds))
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        alone = {name: value[:, start:end] for name, value in x.items()}
        o, lse = window_attention(**alone, **options, return_lse=True)
        assert relative_rms(ours["o"][:, start:end], o) < TOLERANCE
        assert relative_rms(ours["lse"][:, start:end], lse) < TOLERANCE


@pytest.mark.parametrize("window", [1, 8, 64])
def test_cached_is_uncached(window):
    """Later queries with the last window − 1 keys before theirs see what they see in the whole sequence."""
    x = draw_inputs(3, 2, 100, 100, 4, 2, 2)
    whole = window_attention(**x, window=window)
    for start, end in ((70, 100), (99, 100), (30, 31)):
        first = max(0, start - window + 1)
        part = window_attention(x["q"][:, start:end], x["k"][:, first:end], x["v"][:, first:end], window=window)
        assert relative_rms(part, whole[:, start:end]) < 1e-12


def test_left_padded_is_unpadded():
    x = draw_inputs(4, 1, 90, 90, 4, 2, 2)
    alone = window_attention(**x, window=16, sinks=3)
    padded = {name: F.pad(value, (0, 0, 0, 0, 37, 0), value=1e3) for name, value in x.items()}
    key_mask = (torch.arange(127) >= 37)[None]
    o, lse = window_attention(**padded, window=16, sinks=3, key_mask=key_mask, return_lse=True)
    assert relative_rms(o[:, 37:], alone) < 1e-12
    assert (o[:, :37] == 0).all()
    assert (lse[:, :37] == float("-inf")).all()


STEPS = [
    # heads, window, sinks, spare slots, softcap
    ((4, 2, 2), 5, 0, 0, None),
    ((4, 1, 4), 5, 3, 1, None),
    ((6, 1, 3), 1, 0, 1, 2.0),
    ((2, 2, 2), 40, 2, 0, None),
]


def decode(x: dict[str, Tensor], prompt: int, slots: int, backend: str, key_mask: Tensor | None = None, **options):
    """Outputs and log-sum-exps of the tokens after the prompt, one by one, from a cache that is never moved."""
    mask = torch.ones(x["k"].shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    keys, values, position = window_cache(
        x["k"][:, :prompt], x["v"][:, :prompt], slots, sinks=options.get("sinks", 0), key_mask=mask[:, :prompt]
    )
    addresses, outputs = [t.data_ptr() for t in (keys, values, position)], []
    for t in range(prompt, x["k"].shape[1]):
        token = (x[name][:, t] for name in "qkv")
        real = None if key_mask is None else mask[:, t]
        outputs.append(
            window_attention_step(
                *token, keys, values, position, key_mask=real, return_lse=True, backend=backend, **options
            )
        )
    assert addresses == [t.data_ptr() for t in (keys, values, position)]
    assert torch.equal(position, mask.sum(1))
    return tuple(torch.stack(parts, 1) for parts in zip(*outputs, strict=True))


@pytest.mark.parametrize("prompt", [0, 3, 12])
@pytest.mark.parametrize("case", STEPS, ids=str)
def test_steps_are_the_whole(case, prompt):
    heads, window, sinks, spare, softcap = case
    x = draw_inputs(7, 2, 20, 20, *heads)
    options = {"window": window, "sinks": sinks, "softcap": softcap}
    whole = window_attention(**x, **options, return_lse=True)
    for ours, expected in zip(decode(x, prompt, window + sinks + spare, "chunked", **options), whole, strict=True):
        assert relative_rms(ours, expected[:, prompt:]) < 1e-12


@pytest.mark.parametrize("prompt", [0, 4, 11])
def test_left_padding_never_enters_the_cache(prompt):
    """Padding in the prompt, or token by token."""
    x = draw_inputs(8, 3, 20, 20, 4, 2, 2)
    key_mask = torch.arange(20) >= torch.tensor([[0], [3], [8]])
    options = {"window": 4, "sinks": 2}
    whole = window_attention(**x, **options, key_mask=key_mask, return_lse=True)
    found = decode(x, prompt, 7, "chunked", key_mask, **options)
    real = key_mask[:, prompt:]
    for ours, expected in zip(found, whole, strict=True):
        assert relative_rms(ours[real], expected[:, prompt:][real]) < 1e-12
    assert (found[0][~real] == 0).all()
    assert (found[1][~real] == float("-inf")).all()


def test_a_cache_too_small_is_refused():
    x = {name: value.float() for name, value in draw_inputs(0, 1, 1, 1, 1, 1, 1).items()}
    keys, values, position = window_cache(x["k"], x["v"], 5)
    with pytest.raises(ValueError, match="N=5 slots; a window of 4 and 2 sinks need 6"):
        window_attention_step(*(x[name][:, 0] for name in "qkv"), keys, values, position, window=4, sinks=2)


def test_non_contiguous_and_half():
    x = {
        name: value.transpose(1, 2).contiguous().transpose(1, 2)
        for name, value in draw_inputs(5, 2, 70, 70, 4, 2, 2).items()
    }
    assert_close(run(x, torch.float32, "chunked", window=16), run(x, torch.float64, "reference", window=16))
    half = {name: value.bfloat16() for name, value in x.items()}
    o, lse = window_attention(**half, window=16, return_lse=True)
    reference = window_attention(
        **{name: value.double() for name, value in half.items()}, window=16, backend="reference"
    )
    assert o.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert relative_rms(o, reference) < torch.finfo(torch.bfloat16).eps


def test_memory_does_not_grow_with_the_square(monkeypatch):
    """No temporary has a row of keys per query: the largest logits block is window + block wide."""
    from linearize.kernels.window_attention import chunked

    widest = []
    plain = chunked._logits

    def watched(*arguments):
        logits, slope = plain(*arguments)
        widest.append(logits.shape[-1])
        return logits, slope

    monkeypatch.setattr(chunked, "_logits", watched)
    x = draw_inputs(6, 1, 1000, 1000, 1, 1, 1)
    window_attention(**x, window=64)
    assert max(widest) <= 2 * 64


BASE = {name: value.float() for name, value in draw_inputs(0, 2, 4, 6, 4, 2, 2).items()} | {"window": 3}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k": torch.zeros(2, 3, 2, 16), "v": torch.zeros(2, 3, 2, 20)}, ValueError, ["S=3", "T=4"]),
        ({"k": torch.zeros(2, 6, 3, 16)}, ValueError, ["k has 3 heads"]),
        ({"v": torch.zeros(2, 5, 2, 16)}, ValueError, ["v", "S=6"]),
        ({"window": 0}, ValueError, ["window", "0", ">= 1"]),
        ({"window": 2.5}, ValueError, ["window", "2.5"]),
        ({"sinks": -1}, ValueError, ["sinks", "-1"]),
        ({"softcap": 0.0}, ValueError, ["softcap", "0.0"]),
        ({"key_mask": torch.ones(2, 6)}, TypeError, ["key_mask", "bool"]),
        ({"key_mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, ["key_mask", "S=6"]),
        ({"backend": "triton"}, RuntimeError, ["triton", "TRITON_INTERPRET=1"]),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        window_attention(**{**BASE, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
