"""A window and a linear rest under one normaliser: parallel form and steps against a float64 loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels.window_attention import last_tokens, window_attention, window_cache
from linearize.kernels.window_linear_attention import (
    leaving_key,
    window_linear_attention,
    window_linear_attention_step,
)

TOLERANCE = 1e-5


def relative_rms(ours: Tensor, reference: Tensor) -> float:
    assert ours.shape == reference.shape
    assert torch.isfinite(ours).all()
    error = (ours.detach().double() - reference.detach().double()).norm()
    size = reference.detach().double().norm()
    return float(error / size) if size > 1e-12 else float(error)


def draw_inputs(
    seed: int, B: int, T: int, earlier: int, heads: tuple[int, int, int, int], features: int = 12, state: bool = False
) -> dict[str, Tensor]:
    """`heads` are those of q, k, v and phi_k."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).double()

    (H, Hk, Hv, Hf), S = heads, T + earlier
    inputs = {"q": normal(B, T, H, 16), "k": normal(B, S, Hk, 16), "v": normal(B, S, Hv, 20)}
    inputs |= {"phi_q": normal(B, T, H, features).softmax(-1), "phi_k": normal(B, S, Hf, features).softmax(-1)}
    inputs["mix"] = normal(H)
    if state:
        inputs |= {"memory": normal(B, H, features, 20), "normaliser": normal(B, H, features).exp()}
    return inputs


def run(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, **options) -> dict[str, Tensor]:
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    plain = {name: x for name, x in leaves.items() if name not in ("memory", "normaliser")}
    start = (leaves["memory"], leaves["normaliser"]) if "memory" in leaves else None
    o, state = window_linear_attention(
        **plain, initial_state=start, output_final_state=True, backend=backend, **options
    )
    assert o.dtype == dtype and state is not None
    results = {"o": o, "memory": state[0], "normaliser": state[1]}
    generator = torch.Generator().manual_seed(7)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum() for x in results.values())
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return results | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


def assert_close(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    errors = {name: relative_rms(ours[name], reference[name]) for name in reference}
    assert all(error <= tolerance for error in errors.values()), errors


HEADS = [(1, 1, 1, 1), (4, 2, 2, 4), (4, 4, 1, 2), (6, 1, 3, 6)]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    T=st.sampled_from([1, 2, 7, 31]),
    earlier=st.sampled_from(["none", "some", "all", "state"]),
    heads=st.sampled_from(HEADS),
    window=st.sampled_from([1, 2, 6, 40]),
    softcap=st.sampled_from([None, None, 2.0]),
    shift=st.sampled_from(["window", "none"]),
    padding=st.sampled_from([None, "left", "random"]),
)
def test_blocks_are_the_loop(seed, T, earlier, heads, window, softcap, shift, padding):
    before = {"none": 0, "some": window // 2, "all": window, "state": window}[earlier]
    inputs = draw_inputs(seed, 2, T, before, heads, state=earlier == "state")
    S, key_mask = T + before, None
    if padding == "left":
        key_mask = torch.arange(S) >= torch.tensor([[0], [S // 2]])
    elif padding == "random":
        key_mask = torch.rand(2, S, generator=torch.Generator().manual_seed(seed)) < 0.6
    options = {"window": window, "softcap": softcap, "shift": shift, "key_mask": key_mask}
    reference = run(inputs, torch.float64, "reference", **options)
    assert_close(run(inputs, torch.float64, "chunked", **options), reference, 1e-10)
    ours = run(inputs, torch.float32, "chunked", **options)
    assert_close({name: ours[name] for name in ours}, {n: x for n, x in reference.items() if n != "dmix"})


@pytest.mark.parametrize("shift", ["window", "none"])
def test_against_all_pairs(shift):
    """An implementation that shares nothing with ours: weights of all pairs, written out."""
    x = draw_inputs(0, 2, 30, 0, (2, 2, 2, 2))
    distance = torch.arange(30)[:, None] - torch.arange(30)
    logits = torch.einsum("bthk,bshk->bhts", x["q"], x["k"]) / 4
    logits = logits.masked_fill((distance < 0) | (distance >= 5), -torch.inf)
    if shift == "window":
        logits = logits - logits.logsumexp(-1, keepdim=True)
    linear = torch.einsum("bthk,bshk->bhts", x["phi_q"], x["phi_k"]) * (distance >= 5)
    weights = logits.exp() + linear * x["mix"].exp()[:, None, None]
    expected = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), x["v"])
    for backend in ("chunked", "reference"):
        o, _ = window_linear_attention(**x, window=5, shift=shift, backend=backend)
        assert relative_rms(o, expected) < 1e-12


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.sampled_from([0, 1, 5, 6, 7, 30]), min_size=1, max_size=6),
    window=st.sampled_from([1, 6, 40]),
)
def test_packed_is_separate(seed, lengths, window):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    x = draw_inputs(seed, 1, sum(lengths), 0, (4, 2, 2, 4))
    if sum(lengths) == 0:
        return
    ours = run(x, torch.float64, "chunked", window=window, cu_seqlens=bounds)
    assert_close(ours, run(x, torch.float64, "reference", window=window, cu_seqlens=bounds), 1e-10)


def test_left_padded_is_unpadded():
    x = draw_inputs(1, 1, 30, 0, (4, 2, 2, 4))
    alone, state = window_linear_attention(**x, window=6, output_final_state=True)
    padded = {name: F.pad(t, (0, 0, 0, 0, 11, 0), value=9.0) if name != "mix" else t for name, t in x.items()}
    key_mask = (torch.arange(41) >= 11)[None]
    o, end = window_linear_attention(**padded, window=6, key_mask=key_mask, output_final_state=True)
    assert relative_rms(o[:, 11:], alone) < 1e-12
    assert all(relative_rms(a, b) < 1e-12 for a, b in zip(end, state, strict=True))


def test_with_everything_inside_it_is_the_window():
    x = draw_inputs(2, 2, 20, 0, (4, 2, 2, 4))
    o, _ = window_linear_attention(**x, window=20)
    assert relative_rms(o, window_attention(x["q"], x["k"], x["v"], window=20)) < 1e-12


def decode(
    x: dict[str, Tensor], prompt: int, window: int, backend: str, key_mask: Tensor | None = None, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the tokens after the prompt, one by one, and the last sums; nothing moves in memory."""
    B, T = x["q"].shape[:2]
    mask = torch.ones(B, T, dtype=torch.bool) if key_mask is None else key_mask
    first = {name: t[:, :prompt] if name != "mix" else t for name, t in x.items()}
    _, state = window_linear_attention(
        **first, window=window, key_mask=mask[:, :prompt], output_final_state=True, backend="chunked", **options
    )
    assert state is not None
    memory, normaliser = (t.clone(memory_format=torch.contiguous_format) for t in state)
    ring = window_cache(x["k"][:, :prompt], x["v"][:, :prompt], window + 1, key_mask=mask[:, :prompt])
    # The features of a key, found again from the ring's keys as a mixer computes them again.
    features, _, _ = window_cache(x["phi_k"][:, :prompt], x["v"][:, :prompt], window + 1, key_mask=mask[:, :prompt])
    tensors = (*ring, memory, normaliser)
    addresses, outputs = [t.data_ptr() for t in tensors], []
    for t in range(prompt, T):
        position = ring[2].clone()
        token = (x[name][:, t] for name in ("q", "k", "v", "phi_q"))
        leaving = leaving_key(features, position, window)
        real = None if key_mask is None else mask[:, t]
        outputs.append(
            window_linear_attention_step(
                *token, leaving, x["mix"], *tensors, window=window, key_mask=real, backend=backend, **options
            )
        )
        rows = mask[:, t].nonzero()[:, 0]
        features[rows, position[rows] % (window + 1)] = x["phi_k"][rows, t]
    assert addresses == [t.data_ptr() for t in tensors]
    return torch.stack(outputs, 1), memory, normaliser


@pytest.mark.parametrize("prompt", [0, 3, 6, 15])
@pytest.mark.parametrize(("window", "shift", "softcap"), [(1, "window", None), (5, "none", 2.0), (5, "window", None)])
def test_steps_are_the_whole(prompt, window, shift, softcap):
    x = draw_inputs(3, 2, 20, 0, (4, 2, 2, 4))
    options = {"shift": shift, "softcap": softcap}
    whole, state = window_linear_attention(**x, window=window, output_final_state=True, **options)
    o, memory, normaliser = decode(x, prompt, window, "chunked", **options)
    assert relative_rms(o, whole[:, prompt:]) < 1e-12
    assert relative_rms(memory, state[0]) < 1e-12
    assert relative_rms(normaliser, state[1]) < 1e-12


@pytest.mark.parametrize("prompt", [0, 5, 12])
def test_steps_with_left_padding(prompt):
    x = draw_inputs(4, 3, 20, 0, (4, 2, 2, 4))
    key_mask = torch.arange(20) >= torch.tensor([[0], [4], [9]])
    whole, state = window_linear_attention(**x, window=4, key_mask=key_mask, output_final_state=True)
    o, memory, _ = decode(x, prompt, 4, "chunked", key_mask)
    real = key_mask[:, prompt:]
    assert relative_rms(o[real], whole[:, prompt:][real]) < 1e-12
    assert (o[~real] == 0).all()
    assert relative_rms(memory, state[0]) < 1e-12


def test_going_on_from_a_ring():
    """More tokens at once after some were read: the ring's keys stand before them."""
    x = draw_inputs(5, 2, 30, 0, (4, 2, 2, 4))
    whole, end = window_linear_attention(**x, window=6, output_final_state=True)
    first = {name: t[:, :17] if name != "mix" else t for name, t in x.items()}
    _, state = window_linear_attention(**first, window=6, output_final_state=True)
    keys, values, position = window_cache(first["k"], first["v"], 7)
    later = {name: t[:, 17:] if name != "mix" else t for name, t in x.items()}
    later["k"] = torch.cat([last_tokens(keys, position, 6), later["k"]], 1)
    later["v"] = torch.cat([last_tokens(values, position, 6), later["v"]], 1)
    later["phi_k"] = x["phi_k"][:, 11:24]  # those that leave
    o, state = window_linear_attention(**later, window=6, initial_state=state, output_final_state=True)
    assert relative_rms(o, whole[:, 17:]) < 1e-12
    assert all(relative_rms(a, b) < 1e-12 for a, b in zip(state, end, strict=True))


BASE = {name: value.float() for name, value in draw_inputs(0, 2, 4, 2, (4, 2, 2, 4)).items()} | {"window": 3}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"window": 0}, ValueError, ["window", "0", ">= 1"]),
        ({"window": 1}, ValueError, ["S=6", "T=4", "window=1"]),
        ({"phi_k": torch.zeros(2, 2, 4, 12)}, ValueError, ["phi_k", "P=2", "3"]),
        ({"phi_k": torch.zeros(2, 6, 3, 12)}, ValueError, ["phi_k has 3 heads"]),
        ({"mix": torch.zeros(3)}, ValueError, ["mix", "H=4"]),
        ({"shift": "all"}, ValueError, ["shift", "all"]),
        ({"key_mask": torch.ones(2, 6)}, TypeError, ["key_mask", "bool"]),
        ({"initial_state": (torch.zeros(2, 4, 12, 20), torch.zeros(2, 4, 12))}, ValueError, ["initial_state"]),
        ({"backend": "triton"}, RuntimeError, ["triton", "TRITON_INTERPRET=1"]),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        window_linear_attention(**{**BASE, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
