"""Gated slot attention on the CPU: the chunked form, Triton in its interpreter and the step against the float64 loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels.dispatch import triton_interpreted
from linearize.kernels.slot_attention import slot_attention, slot_attention_step
from tests.kernels.test_gated_scan import run_interpreted
from tests.kernels.test_linear_attention import assert_close, relative_rms

TOLERANCE = 1e-5
STATE = ("keys", "values")
INPUTS = ("q", "k", "v", "s", "log_decay")

many = settings(max_examples=25, deadline=None, derandomize=True)
few = settings(max_examples=10, deadline=None, derandomize=True)
interpreted = pytest.mark.skipif(not triton_interpreted(), reason="runs in a process with TRITON_INTERPRET=1")


def draw_inputs(
    seed: int,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    M: int,
    states: int | None = None,
    weakest: float = 1e-3,
    strongest: float = 5.0,
) -> dict[str, Tensor]:
    """Float64 inputs that float32 holds exactly; log decays log-uniform between the strengths, s apart from them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    inputs = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V), "s": normal(B, T, H, M)}
    low, high = math.log(weakest), math.log(strongest)
    inputs["log_decay"] = -(torch.rand(B, T, H, M, generator=generator) * (high - low) + low).exp().double()
    if states is not None:
        inputs |= {"keys": normal(states, H, M, K), "values": normal(states, H, M, V)}
    return inputs


def call(x: dict[str, Tensor], **options) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    state = (x["keys"], x["values"]) if "keys" in x else None
    o, final = slot_attention(*(x[name] for name in INPUTS), initial_state=state, output_final_state=True, **options)
    assert final is not None
    return o, final


def run(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, **options) -> dict[str, Tensor]:
    """Output, final slots and all gradients under random output gradients."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    o, state = call(leaves, backend=backend, **options)
    results = {"o": o, **dict(zip(STATE, state, strict=True))}
    generator = torch.Generator().manual_seed(7)
    loss = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in results.values())
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {**results, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


@many
@given(
    seed=st.integers(0, 2**31),
    T=st.sampled_from([0, 1, 2, 15, 17, 63, 64, 65, 130]),
    K=st.sampled_from([16, 60]),
    V=st.sampled_from([16, 60]),
    M=st.sampled_from([2, 8, 64]),
    strongest=st.sampled_from([0.01, 1.0, 50.0]),
    initial=st.booleans(),
)
def test_chunked_is_the_recurrence(seed, T, K, V, M, strongest, initial):
    inputs = draw_inputs(seed, 2, T, 2, K, V, M, 2 if initial else None, strongest=strongest)
    reference = run(inputs, torch.float64, "reference")
    assert_close(run(inputs, torch.float64, "chunked"), reference, 1e-11)
    assert_close(run(inputs, torch.float32, "chunked"), reference, TOLERANCE)


def test_the_loop_is_attention_over_slots_of_weighted_sums():
    """Slot m at t holds `Σ_j s_jm Π a_m k_j`, written out over all pairs."""
    x = draw_inputs(0, 2, 20, 2, 8, 12, 5, strongest=1.0)
    reached = x["log_decay"].cumsum(1)
    earlier = torch.ones(20, 20, dtype=torch.bool).tril()[None, :, :, None, None]
    weight = (reached[:, :, None] - reached[:, None]).masked_fill(~earlier, -torch.inf).exp() * x["s"][:, None]
    keys = torch.einsum("btshm,bshk->bthmk", weight, x["k"])
    values = torch.einsum("btshm,bshv->bthmv", weight, x["v"])
    slots = (torch.einsum("bthmk,bthk->bthm", keys, x["q"]) * 8**-0.5).softmax(-1)
    expected = torch.einsum("bthm,bthmv->bthv", slots, values)
    assert relative_rms(call(x, backend="reference")[0], expected) < 1e-12


def test_with_a_slot_for_every_token_it_is_softmax_attention():
    """s = one-hot at the token's own slot, no decay; empty slots weigh e^0 and hold 0, so they are divided out."""
    x = draw_inputs(1, 1, 12, 2, 8, 8, 12)
    x["s"] = torch.eye(12).double()[None, :, None].expand(1, 12, 2, 12)
    x["log_decay"] = torch.zeros_like(x["s"])
    x["v"] = torch.cat([x["v"], torch.ones_like(x["v"][..., :1])], -1)
    o, _ = call(x)
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v[..., :-1], is_causal=True).transpose(1, 2)
    assert relative_rms(o[..., :-1] / o[..., -1:], expected) < 1e-12


@few
@given(seed=st.integers(0, 2**31), cut=st.integers(0, 100))
def test_pieces_are_the_whole_with_their_gradients(seed, cut):
    x = {name: value.requires_grad_() for name, value in draw_inputs(seed, 2, 100, 2, 16, 20, 8, states=2).items()}
    whole, final = call(x)
    first, middle = call({name: value if name in STATE else value[:, :cut] for name, value in x.items()})
    rest = {name: value[:, cut:] for name, value in x.items() if name not in STATE}
    second, last = call({**rest, **dict(zip(STATE, middle, strict=True))})
    pieces = torch.cat([first, second], 1)
    assert relative_rms(pieces, whole) < 1e-11
    for ours, expected in zip(last, final, strict=True):
        assert relative_rms(ours, expected) < 1e-11
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1)).double()
    ours, expected = (torch.autograd.grad((o * weights).sum(), list(x.values())) for o in (pieces, whole))
    for a, b in zip(ours, expected, strict=True):
        assert relative_rms(a, b) < 1e-11


@few
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.sampled_from([0, 1, 2, 17, 65]), min_size=1, max_size=5),
    initial=st.booleans(),
)
def test_packed_is_separate(seed, lengths, initial):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs = draw_inputs(seed, 1, sum(lengths), 2, 16, 16, 8, len(lengths) if initial else None)
    ours = run(inputs, torch.float64, "chunked", cu_seqlens=bounds)
    assert_close(ours, run(inputs, torch.float64, "reference", cu_seqlens=bounds), 1e-11)
    for n, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        o, state = call({name: x[n : n + 1] if name in STATE else x[:, start:end] for name, x in inputs.items()})
        assert relative_rms(ours["o"][:, start:end], o) < 1e-11
        for name, expected in zip(STATE, state, strict=True):
            assert relative_rms(ours[name][n : n + 1], expected) < 1e-11


@few
@given(seed=st.integers(0, 2**31), strongest=st.sampled_from([0.01, 50.0]))
def test_steps_are_the_recurrence_in_place(seed, strongest):
    x = draw_inputs(seed, 2, 17, 3, 16, 20, 8, 2, strongest=strongest)
    o, final = call(x, backend="reference")
    state = (x["keys"].clone(), x["values"].clone())
    addresses = [t.data_ptr() for t in state]
    steps = [slot_attention_step(*(x[name][:, t] for name in INPUTS), state) for t in range(17)]
    assert [t.data_ptr() for t in state] == addresses
    assert relative_rms(torch.stack(steps, 1), o) < 1e-11
    for ours, expected in zip(state, final, strict=True):
        assert relative_rms(ours, expected) < 1e-11


@pytest.mark.parametrize("missing", ["q", "k", "s", "log_decay", "keys"])
def test_each_input_may_need_a_gradient_alone(missing):
    inputs = draw_inputs(4, 1, 40, 2, 16, 16, 8, states=1)
    every = run(inputs, torch.float64, "chunked")
    leaves = {name: x.clone().requires_grad_(name == missing) for name, x in inputs.items()}
    o, state = call(leaves)
    generator = torch.Generator().manual_seed(7)
    sum((x * torch.randn(x.shape, generator=generator)).sum() for x in (o, *state)).backward()
    assert relative_rms(leaves[missing].grad, every[f"d{missing}"]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_computed_in_float32(dtype):
    x = draw_inputs(5, 2, 65, 2, 16, 16, 8)
    x = {name: v.float() if name == "log_decay" else v.to(dtype) for name, v in x.items()}
    o, state = call(x)
    expected, _ = call({name: v.double() for name, v in x.items()}, backend="reference")
    assert o.dtype == dtype and {t.dtype for t in state} == {torch.float32}
    assert relative_rms(o, expected) < torch.finfo(dtype).eps


BASE = {name: value.float() for name, value in draw_inputs(0, 2, 4, 3, 8, 8, 5).items()}
ZEROS = (torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5, 8))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k": torch.zeros(2, 5, 3, 8)}, ValueError, ["k", "T=4"]),
        ({"s": torch.zeros(2, 4, 3)}, ValueError, ["s", "4 dimensions"]),
        ({"log_decay": torch.zeros(2, 4, 3, 6)}, ValueError, ["log_decay", "M=5"]),
        ({"log_decay": torch.full((2, 4, 3, 5), 0.25)}, ValueError, ["log_decay", "0.25", "<= 0"]),
        ({"s": torch.zeros(2, 4, 3, 5, dtype=torch.int64)}, TypeError, ["s", "int64"]),
        ({"initial_state": (ZEROS[0], ZEROS[1][..., :7])}, ValueError, ["initial_state's values", "8"]),
        ({"initial_state": (ZEROS[0].to("meta"), ZEROS[1])}, ValueError, ["initial_state's keys", "meta", "cpu"]),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, ["batch must be 1"]),
        ({"backend": "fast"}, ValueError, ["backend", "fast", "chunked"]),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        slot_attention(**{**BASE, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_step_refuses_slots_in_half_precision():
    with pytest.raises(TypeError, match="state's values have dtype"):
        slot_attention_step(*(BASE[name][:, 0] for name in INPUTS), (ZEROS[0], ZEROS[1].bfloat16()))


def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked entries may overflow, as on a GPU
@pytest.mark.parametrize("initial", [False, True])
def test_interpreted_triton_is_the_recurrence(initial):
    inputs = draw_inputs(6, 1, 70, 1, 16, 20, 16, 1 if initial else None)
    assert_close(run(inputs, torch.float32, "triton"), run(inputs, torch.float64, "reference"), 2e-5)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted_triton_packed_and_step():
    inputs, bounds = draw_inputs(7, 1, 70, 1, 16, 16, 16, 3), torch.tensor([0, 30, 30, 70])
    expected = run(inputs, torch.float64, "reference", cu_seqlens=bounds)
    assert_close(run(inputs, torch.float32, "triton", cu_seqlens=bounds), expected, 2e-5)
    states = [tuple(inputs[name][:1].to(dtype) for name in STATE) for dtype in (torch.float32, torch.float64)]
    outputs = []
    for state, backend in zip(states, ("triton", "chunked"), strict=True):
        token = (inputs[name][:, 0].to(state[0].dtype) for name in INPUTS)
        outputs.append(slot_attention_step(*token, state, backend=backend))
    assert relative_rms(*outputs) < 1e-5
    for ours, right in zip(*states, strict=True):
        assert relative_rms(ours, right) < 1e-5
