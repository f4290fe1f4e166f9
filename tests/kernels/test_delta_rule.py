"""The delta rule on the CPU: the chunked form and the decode step against the float64 loop."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels.delta_rule import delta_rule, delta_rule_step

TIMES = [0, 1, 2, 15, 16, 17, 63, 64, 65, 130]
WIDTHS = [16, 60, 64]
DECAYS = ["none", "scalar", "vector"]
TOLERANCE = 1e-5

many = settings(max_examples=25, deadline=None, derandomize=True)
few = settings(max_examples=10, deadline=None, derandomize=True)


def draw_inputs(
    seed: int,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    decay: str,
    states: int | None = None,
    weakest: float = 1e-4,
    strongest: float = 50.0,
    largest_beta: float = 1.0,
) -> dict[str, Tensor]:
    """Float64 inputs that float32 holds exactly; keys of length 1, decays log-uniform between the strengths."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    inputs["k"] = torch.nn.functional.normalize(inputs["k"], dim=-1)
    inputs["beta"] = largest_beta * normal(B, T, H).sigmoid()
    shapes = {"scalar": (B, T, H), "vector": (B, T, H, K)}
    if decay in shapes:
        low, high = math.log(weakest), math.log(strongest)
        exponent = torch.rand(shapes[decay], generator=generator) * (high - low) + low
        inputs["log_decay"] = -exponent.exp().clamp(weakest, strongest)
    if states is not None:
        inputs["initial_state"] = normal(states, H, K, V)
    return {name: x.double() for name, x in inputs.items()}


def relative_rms(ours: Tensor, reference: Tensor) -> float:
    assert ours.shape == reference.shape
    assert torch.isfinite(ours).all()
    if reference.numel() == 0:
        return 0.0
    error = (ours.detach().double() - reference.detach().double()).norm()
    size = reference.detach().double().norm()
    return float(error / size) if size > 0 else float(error)


def run(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, seed: int = 7, **options) -> dict[str, Tensor]:
    """Outputs, final state and all gradients under random output gradients."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    o, state = delta_rule(**leaves, output_final_state=True, backend=backend, **options)
    assert state is not None
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(o.shape, generator=generator).to(o.dtype)
    dstate = torch.randn(state.shape, generator=generator).to(state.dtype)
    loss = (o * do).sum() + (state * dstate).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"o": o, "state": state, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


def assert_close(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    errors = {name: relative_rms(ours[name], reference[name]) for name in reference}
    assert all(error <= tolerance for error in errors.values()), errors


@many
@given(
    seed=st.integers(0, 2**31),
    B=st.integers(1, 2),
    T=st.sampled_from(TIMES),
    H=st.integers(1, 3),
    K=st.sampled_from(WIDTHS),
    V=st.sampled_from(WIDTHS),
    decay=st.sampled_from(DECAYS),
    initial=st.booleans(),
)
def test_chunked_is_the_recurrence(seed, B, T, H, K, V, decay, initial):
    inputs = draw_inputs(seed, B, T, H, K, V, decay, B if initial else None)
    reference = run(inputs, torch.float64, "reference")
    assert_close(run(inputs, torch.float32, "chunked"), reference)
    assert_close(run(inputs, torch.float64, "chunked"), reference, 1e-12)


@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0, 5.0, 50.0])
def test_one_decay_strength(decay, strength):
    """Every log decay the same: gradients of strong decays are tiny and must still be right relatively."""
    inputs = draw_inputs(3, 1, 200, 2, 16, 16, decay, states=1, weakest=strength, strongest=strength)
    assert_close(run(inputs, torch.float32, "chunked"), run(inputs, torch.float64, "reference"))


@pytest.mark.parametrize("decay", DECAYS)
def test_betas_up_to_two_and_none(decay):
    """Eigenvalues down to −1, and steps that write nothing."""
    inputs = draw_inputs(8, 1, 130, 2, 64, 16, decay, states=1, largest_beta=2.0)
    inputs["beta"][:, 3::7] = 0
    assert_close(run(inputs, torch.float32, "chunked"), run(inputs, torch.float64, "reference"))


@pytest.mark.parametrize("decay", DECAYS)
def test_one_key_again_and_again(decay):
    """The worst-conditioned chunk: equal keys, each step overwriting the one before."""
    inputs = draw_inputs(9, 1, 130, 1, 16, 16, decay, states=1, strongest=0.1)
    inputs["k"][:] = inputs["k"][:, :1]
    for beta in (inputs["beta"], torch.ones_like(inputs["beta"])):
        inputs["beta"] = beta
        assert_close(run(inputs, torch.float32, "chunked"), run(inputs, torch.float64, "reference"))


@few
@given(seed=st.integers(0, 2**31), cut=st.integers(0, 130), decay=st.sampled_from(DECAYS))
def test_split_in_two_is_the_whole(seed, cut, decay):
    x = {name: value.float() for name, value in draw_inputs(seed, 2, 130, 2, 16, 60, decay, states=2).items()}
    initial = x.pop("initial_state")
    whole, final = delta_rule(**x, initial_state=initial, output_final_state=True)

    def part(here: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        timed = {name: value[:, here] for name, value in x.items()}
        return delta_rule(**timed, initial_state=state, output_final_state=True)

    first, state = part(slice(0, cut), initial)
    second, state = part(slice(cut, None), state)
    assert relative_rms(torch.cat([first, second], 1), whole) < TOLERANCE
    assert relative_rms(state, final) < TOLERANCE


@few
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.sampled_from([0, 0, 1, 1, 2, 17, 30, 65, 100]), min_size=1, max_size=6),
    decay=st.sampled_from(DECAYS),
    initial=st.booleans(),
)
def test_packed_is_separate(seed, lengths, decay, initial):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs = draw_inputs(seed, 1, sum(lengths), 2, 16, 16, decay, len(lengths) if initial else None)
    ours = run(inputs, torch.float32, "chunked", cu_seqlens=bounds)
    assert_close(ours, run(inputs, torch.float64, "reference", cu_seqlens=bounds))
    for n, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        alone = {name: x[:, start:end].float() for name, x in inputs.items() if name != "initial_state"}
        if initial:
            alone["initial_state"] = inputs["initial_state"][n : n + 1].float()
        o, state = delta_rule(**alone, output_final_state=True)
        assert relative_rms(ours["o"][:, start:end], o) < TOLERANCE
        assert relative_rms(ours["state"][n : n + 1], state) < TOLERANCE


@pytest.mark.parametrize("decay", DECAYS)
def test_packed_sequences_of_similar_length(decay):
    """Lengths that are padded to a common one: padding must neither decay a state nor write to it."""
    bounds = torch.tensor([0, 17, 47, 47, 78])
    inputs = draw_inputs(6, 1, 78, 2, 16, 16, decay, states=4, strongest=0.1)
    ours = run(inputs, torch.float32, "chunked", cu_seqlens=bounds)
    assert_close(ours, run(inputs, torch.float64, "reference", cu_seqlens=bounds))


@few
@given(
    seed=st.integers(0, 2**31),
    K=st.sampled_from(WIDTHS),
    V=st.sampled_from(WIDTHS),
    decay=st.sampled_from(DECAYS),
)
def test_steps_are_the_recurrence(seed, K, V, decay):
    x = draw_inputs(seed, 2, 17, 3, K, V, decay, states=2)
    o, final = delta_rule(**x, output_final_state=True, backend="reference")
    state = x.pop("initial_state").float().clone()
    address = state.data_ptr()
    steps = [
        delta_rule_step(**{name: value[:, t].float() for name, value in x.items()}, state=state) for t in range(17)
    ]
    assert state.data_ptr() == address
    assert relative_rms(torch.stack(steps, 1), o) < TOLERANCE
    assert relative_rms(state, final) < TOLERANCE


@pytest.mark.parametrize("decay", DECAYS)
def test_non_contiguous_inputs(decay):
    inputs = draw_inputs(1, 2, 65, 3, 16, 60, decay, states=2)
    reference = run(inputs, torch.float64, "reference")
    scattered = {name: torch.stack([x, x], dim=-1)[..., 0] for name, x in inputs.items()}
    for name in ("q", "k", "v", "beta"):
        scattered[name] = scattered[name].transpose(1, 2).contiguous().transpose(1, 2)
        assert not scattered[name].is_contiguous()
    assert_close(run(scattered, torch.float32, "chunked"), reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", DECAYS)
def test_half_inputs_are_computed_in_float32(dtype, decay):
    """Inputs already rounded to `dtype`: only the output is rounded again, and the state not at all."""
    x = draw_inputs(5, 2, 65, 2, 16, 16, decay)
    x.update({name: x[name].to(dtype).double() for name in ("q", "k", "v")})
    o, state = delta_rule(**x, output_final_state=True, backend="reference")
    half = {name: value.to(dtype if name in ("q", "k", "v") else torch.float32) for name, value in x.items()}
    ours, our_state = delta_rule(**half, output_final_state=True)
    assert ours.dtype == dtype
    assert our_state.dtype == torch.float32
    assert relative_rms(ours, o) < torch.finfo(dtype).eps
    assert relative_rms(our_state, state) < TOLERANCE


def test_scale_and_defaults():
    x = {name: value.float() for name, value in draw_inputs(2, 1, 20, 2, 16, 16, "none").items()}
    o, state = delta_rule(**x)
    assert state is None
    twice, _ = delta_rule(**x, scale=2 * 16**-0.5)
    assert relative_rms(twice, 2 * o) < 1e-6
    reference, _ = delta_rule(**x, scale=0.5, backend="reference")
    assert relative_rms(delta_rule(**x, scale=0.5)[0], reference) < TOLERANCE


def test_a_full_step_stores_its_value():
    """After a step of strength 1 the state recalls exactly v under k, whatever was there."""
    x = {name: value.float() for name, value in draw_inputs(2, 1, 20, 2, 16, 16, "scalar").items()}
    x["beta"][:] = 1
    o, _ = delta_rule(**{**x, "q": x["k"]}, scale=1.0)
    assert relative_rms(o, x["v"]) < TOLERANCE


def test_each_input_may_need_a_gradient_alone():
    inputs = draw_inputs(4, 1, 40, 2, 16, 16, "vector", states=1)
    every = run(inputs, torch.float32, "chunked")
    for name in inputs:
        leaves = {other: x.float().requires_grad_(other == name) for other, x in inputs.items()}
        o, state = delta_rule(**leaves, output_final_state=True)
        generator = torch.Generator().manual_seed(7)
        do, ds = torch.randn(o.shape, generator=generator), torch.randn(state.shape, generator=generator)
        ((o * do).sum() + (state * ds).sum()).backward()
        assert relative_rms(leaves[name].grad, every[f"d{name}"]) < 1e-6
        assert all(leaves[other].grad is None for other in inputs if other != name)


BASE = {name: value.float() for name, value in draw_inputs(0, 2, 4, 3, 8, 8, "vector").items()}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k": torch.zeros(2, 5, 3, 8)}, ValueError, ["k", "T=4"]),
        ({"v": torch.zeros(2, 4, 8)}, ValueError, ["v", "4 dimensions"]),
        ({"v": [1.0]}, TypeError, ["v", "list"]),
        ({"q": torch.zeros(2, 4, 3, 8, dtype=torch.int64)}, TypeError, ["q", "int64"]),
        ({"beta": torch.zeros(2, 4, 3, 8)}, ValueError, ["beta", "3 dimensions"]),
        ({"beta": torch.zeros(2, 4, 2)}, ValueError, ["beta", "H=3"]),
        ({"log_decay": torch.full((2, 4, 3, 8), 0.25)}, ValueError, ["log_decay", "0.25", "<= 0"]),
        ({"log_decay": torch.zeros(3)}, ValueError, ["log_decay", "4 dimensions"]),
        ({"initial_state": torch.zeros(1, 3, 8, 8)}, ValueError, ["initial_state", "2"]),
        (
            {"initial_state": torch.zeros(2, 3, 8, 8, device="meta")},
            ValueError,
            ["initial_state", "meta", "cpu"],
        ),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, ["batch must be 1"]),
        ({"backend": "fast"}, ValueError, ["backend", "fast", "chunked"]),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        delta_rule(**{**BASE, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_arguments_of_a_step_are_named():
    token = {name: value[:, 0] for name, value in BASE.items()}
    state = torch.zeros(2, 3, 8, 8)
    with pytest.raises(ValueError, match="beta"):
        delta_rule_step(**{**token, "beta": torch.zeros(2, 4)}, state=state)
    with pytest.raises(TypeError, match="state has dtype"):
        delta_rule_step(**token, state=state.half())


def test_no_block_is_narrower_than_linear_attention_allows():
    """In 16 bits some GPUs miscompile products of tiles narrower than 64."""
    from linearize.kernels.delta_rule import launch

    for K, V, itemsize in itertools.product(range(1, 257, 5), [1, 16, 64, 128, 4096], [2, 4]):
        blocks = [launch.scan_launch(K, V, itemsize, backward=backward).block for backward in (False, True)]
        for table in (launch.prepare_launch, launch.finish_launch):
            pick, v_block = table(K, V, itemsize)
            assert pick.block <= launch.padded(K, itemsize)
            blocks += [pick.block, v_block]
        assert min(blocks) >= (64 if itemsize == 2 else 16)
