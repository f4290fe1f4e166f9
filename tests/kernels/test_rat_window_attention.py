"""RAT with a window on the CPU: the blocked form and single steps against a softmax per token, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels.rat_attention import rat_window_attention, rat_window_attention_step

NAMES = ("q", "k", "v", "keys", "values", "offset")


def draw(seed: int, T: int, S: int, C: int, *, last: int, groups: int = 2, heads: int = 4, K: int = 8) -> list[Tensor]:
    """Inputs of two rows, summaries for `last` tokens."""
    make = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    pair, summary = (2, S, groups, K), (2, last // C + 1, groups, K)
    shapes = [(2, T, heads, K), pair, pair, summary, summary, (heads,)]
    return [torch.randn(shape, **make) for shape in shapes]


def run(inputs: list[Tensor], dtype: torch.dtype, backend: str, **options: Any) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    o = rat_window_attention(*leaves, backend=backend, **options)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [o.detach(), *torch.autograd.grad(o, leaves, do, materialize_grads=True)]


def assert_close(ours: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    errors = {
        name: float((a.double() - b).norm() / b.norm().clamp_min(1.0))
        for name, a, b in zip(("o", *NAMES), ours, expected, strict=True)
    }
    assert max(errors.values()) <= tolerance, errors


CASES = {
    # T, earlier keys, origin
    "whole": (70, 0, None),
    "padded": (70, 0, [0, 33]),
    "all padding": (40, 0, [40, 3]),
    "going on": (30, None, [-100, -37]),
    "one token": (1, None, [-7, -64]),
}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    case=st.sampled_from(sorted(CASES)),
    window=st.sampled_from([0, 1, 5, 16, 100]),
    chunk=st.sampled_from([1, 4, 16]),
    reach=st.sampled_from([None, None, 1, 100, 117]),
    softcap=st.sampled_from([None, 2.0]),
)
def test_blocks_are_a_softmax_per_token(case, window, chunk, reach, softcap):
    T, earlier, origin = CASES[case]
    earlier = max(0, window + chunk - 2 if window else 0) if earlier is None else earlier
    where = None if origin is None else torch.tensor(origin) + (earlier if min(origin) < 0 else 0)
    x = draw(3, T, T + earlier, chunk, last=170)
    options = {"window": window, "chunk_size": chunk, "reach": reach, "softcap": softcap, "origin": where}
    expected = run(x, torch.float64, "reference", **options)
    assert_close(run(x, torch.float64, "chunked", **options), expected, 1e-12)
    assert_close(run(x, torch.float32, "chunked", **options), expected, 1e-5)


def test_against_torch():
    """An implementation that shares nothing with ours, its mask written out by hand: keys first, then summaries."""
    q, k, v, keys, values, offset = draw(0, 40, 40, 4, last=40, groups=4)
    window, chunk = 6, 4
    mask = torch.zeros(40, 40 + len(keys[0]), dtype=torch.bool)
    for t in range(40):
        first = max(0, (t - window + 1) // chunk * chunk)
        mask[t, first : t + 1] = True
        mask[t, 40 : 40 + first // chunk] = True
    bias = torch.cat([torch.zeros(4, 40), offset[:, None].expand(-1, len(keys[0]))], 1)[:, None]
    bias = bias.masked_fill(~mask, float("-inf"))
    q, k, v = (x.transpose(1, 2) for x in (q, torch.cat([k, keys], 1), torch.cat([v, values], 1)))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)
    inputs = draw(0, 40, 40, 4, last=40, groups=4)
    for backend in ("chunked", "reference"):
        o = rat_window_attention(*inputs, window=window, chunk_size=chunk, backend=backend)
        assert (o - dense).norm() < 1e-12 * dense.norm()


STEPS = [(0, 4, None, None), (5, 4, None, 2.0), (16, 16, 20, None), (3, 1, None, None)]


def steps(window: int, chunk: int, reach: int | None, softcap: float | None, dtype: torch.dtype, backend: str) -> None:
    """Token by token from a ring, each row from a place of its own, is the whole."""
    q, k, v, keys, values, offset = (x.to(dtype) for x in draw(5, 40, 40, chunk, last=40))
    options: dict[str, Any] = {"window": window, "chunk_size": chunk, "reach": reach, "softcap": softcap}
    whole = rat_window_attention(q, k, v, keys, values, offset, **options, backend="chunked")
    slots = window + chunk + 1
    ring = (k.new_full((2, slots, *k.shape[2:]), 1e4), v.new_full((2, slots, *v.shape[2:]), 1e4)) if window else None
    start = torch.tensor([0, 20])
    for t in range(20):  # the second row's first tokens
        for slot, x in zip(ring or (), (k, v), strict=False):
            slot[1, t % slots] = x[1, t]
    rows = torch.arange(2)
    for n in range(20):
        p = start + n
        token = (x[rows, p] for x in (q, k, v))
        o = rat_window_attention_step(*token, keys, values, offset, ring, p, **options, backend=backend)
        assert (o - whole[rows, p]).norm() < (1e-12 if dtype == torch.float64 else 2e-6) * whole[rows, p].norm()


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_steps_are_the_whole(case):
    steps(*case, torch.float64, "chunked")


def test_bfloat16_keeps_its_dtype():
    x = [t.bfloat16() for t in draw(1, 70, 70, 4, last=70)]
    o = rat_window_attention(*x, window=8, chunk_size=4)
    exact = rat_window_attention(*(t.double() for t in x), window=8, chunk_size=4)
    assert o.dtype == torch.bfloat16 and (o.double() - exact).norm() < 4e-3 * exact.norm()


def test_an_empty_sequence():
    x = [t.requires_grad_() for t in draw(1, 0, 0, 4, last=0)]
    o = rat_window_attention(*x, window=8, chunk_size=4)
    assert o.shape == (2, 0, 4, 8) and o.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": -1}, "window is -1"),
        ({"chunk_size": 6}, "power of two"),
        ({"reach": 0}, "reach is 0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"origin": torch.zeros(2)}, "origin has dtype"),
    ],
)
def test_errors_name_the_argument(change, message):
    with pytest.raises((TypeError, ValueError), match=f"rat_window_attention: .*{message}"):
        rat_window_attention(*draw(0, 4, 4, 4, last=4), **{"window": 4, "chunk_size": 4, **change})
    token = [x[:, 0] for x in draw(0, 4, 4, 4, last=4)[:3]]
    keys, values, offset = draw(0, 4, 4, 4, last=4)[3:]
    with pytest.raises(ValueError, match="ring has 0 slots; window=4 with chunk_size=4 needs 7"):
        rat_window_attention_step(
            *token, keys, values, offset, None, torch.zeros(2, dtype=torch.int64), window=4, chunk_size=4
        )
