"""mLSTM on the CPU: the chunked form, Triton in its interpreter and the decode step against the float64 loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linearize.kernels.dispatch import triton_interpreted
from linearize.kernels.mlstm import mlstm, mlstm_step
from tests.kernels.test_gated_scan import run_interpreted
from tests.kernels.test_linear_attention import assert_close, relative_rms

# max(|n q|, e^-m) passes near 0, which costs float32 digits that the loop loses too.
TOLERANCE = 1e-4
STATE = ("m", "C", "n")

many = settings(max_examples=25, deadline=None, derandomize=True)
few = settings(max_examples=10, deadline=None, derandomize=True)
interpreted = pytest.mark.skipif(not triton_interpreted(), reason="runs in a process with TRITON_INTERPRET=1")


def draw_inputs(
    seed: int, B: int, T: int, H: int, K: int, V: int, states: int | None = None, gates: float = 3.0, keep: float = 2.0
) -> dict[str, Tensor]:
    """Float64 inputs that float32 holds exactly; gates of that standard deviation, forget gates around `keep`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    inputs = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    inputs["i"] = (gates * normal(B, T, H)).float().double()
    inputs["f"] = (gates * normal(B, T, H) + keep).float().double()
    if states is not None:
        inputs |= {"m": normal(states, H), "C": normal(states, H, K, V), "n": normal(states, H, K)}
    return inputs


def call(x: dict[str, Tensor], **options) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    state = tuple(x[name] for name in STATE) if "m" in x else None
    o, final = mlstm(*(x[name] for name in "qkvif"), initial_state=state, output_final_state=True, **options)
    assert final is not None
    return o, final


def run(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, **options) -> dict[str, Tensor]:
    """Output, final state and all gradients under random output gradients."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    o, state = call(leaves, backend=backend, **options)
    results = {"o": o, **dict(zip(STATE, state, strict=True))}
    generator = torch.Generator().manual_seed(7)
    loss = sum(
        (results[name] * torch.randn(results[name].shape, generator=generator)).sum() for name in ("o", "C", "n")
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {**results, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


@many
@given(
    seed=st.integers(0, 2**31),
    T=st.sampled_from([0, 1, 2, 15, 17, 63, 64, 65, 130]),
    K=st.sampled_from([16, 60]),
    V=st.sampled_from([16, 60]),
    gates=st.sampled_from([0.1, 3.0, 20.0]),
    keep=st.sampled_from([-3.0, 0.0, 5.0]),
    initial=st.booleans(),
)
def test_chunked_is_the_recurrence(seed, T, K, V, gates, keep, initial):
    inputs = draw_inputs(seed, 2, T, 2, K, V, 2 if initial else None, gates, keep)
    reference = run(inputs, torch.float64, "reference")
    assert_close(run(inputs, torch.float64, "chunked"), reference, 1e-9)
    assert_close(run(inputs, torch.float32, "chunked"), reference, TOLERANCE if gates < 10 else 2e-3)


def test_the_loop_computes_the_formula_without_a_maximum():
    """`C = Σ_j e^{i_j} Π σ(f) k_j v_jᵀ`, `o = Cᵀq / max(|nᵀq|, 1)`: m has cancelled."""
    x = draw_inputs(0, 2, 20, 2, 8, 8, gates=1.0)
    reached = torch.nn.functional.logsigmoid(x["f"]).cumsum(1)
    log_weight = reached[:, :, None] - reached[:, None] + x["i"][:, None]
    earlier = torch.ones(20, 20, dtype=torch.bool).tril()[None, :, :, None]
    weight = log_weight.masked_fill(~earlier, -torch.inf).exp()
    scores = torch.einsum("bthk,bshk->btsh", x["q"], x["k"]) * 8**-0.5 * weight
    expected = torch.einsum("btsh,bshv->bthv", scores, x["v"]) / scores.sum(2).abs().clamp_min(1)[..., None]
    assert relative_rms(call(x, backend="reference")[0], expected) < 1e-12


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_no_gradient_has_to_pass_through_the_maximum(backend):
    """Finite differences move m too, and find the same gradient."""
    x = {name: value.requires_grad_() for name, value in draw_inputs(1, 1, 9, 1, 3, 2, gates=1.0).items()}
    assert torch.autograd.gradcheck(lambda *leaves: mlstm(*leaves, backend=backend)[0], tuple(x.values()))


@few
@given(seed=st.integers(0, 2**31), cut=st.integers(0, 100))
def test_pieces_are_the_whole_with_their_gradients(seed, cut):
    x = {name: value.requires_grad_() for name, value in draw_inputs(seed, 2, 100, 2, 16, 20, states=2).items()}
    whole, final = call(x)
    first, middle = call({name: value if name in STATE else value[:, :cut] for name, value in x.items()})
    rest = {name: value[:, cut:] for name, value in x.items() if name not in STATE}
    second, last = call({**rest, **dict(zip(STATE, middle, strict=True))})
    pieces = torch.cat([first, second], 1)
    assert relative_rms(pieces, whole) < 1e-9
    for ours, expected in zip(last, final, strict=True):
        assert relative_rms(ours, expected) < 1e-9
    wanted = [value for name, value in x.items() if name != "m"]
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1)).double()
    ours, expected = (torch.autograd.grad((o * weights).sum(), wanted) for o in (pieces, whole))
    for a, b in zip(ours, expected, strict=True):
        assert relative_rms(a, b) < 1e-9


@few
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.sampled_from([0, 1, 2, 17, 65]), min_size=1, max_size=5),
    initial=st.booleans(),
)
def test_packed_is_separate(seed, lengths, initial):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    inputs = draw_inputs(seed, 1, sum(lengths), 2, 16, 16, len(lengths) if initial else None)
    ours = run(inputs, torch.float64, "chunked", cu_seqlens=bounds)
    assert_close(ours, run(inputs, torch.float64, "reference", cu_seqlens=bounds), 1e-9)
    for n, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        alone = {name: x[n : n + 1] if name in STATE else x[:, start:end] for name, x in inputs.items()}
        o, state = call(alone)
        assert relative_rms(ours["o"][:, start:end], o) < 1e-9
        for name, expected in zip(STATE, state, strict=True):
            assert relative_rms(ours[name][n : n + 1], expected) < 1e-9


@few
@given(seed=st.integers(0, 2**31), gates=st.sampled_from([1.0, 20.0]), start=st.booleans())
def test_steps_are_the_recurrence_in_place(seed, gates, start):
    x = draw_inputs(seed, 2, 17, 3, 16, 20, 2, gates)
    if not start:
        x |= {name: torch.zeros_like(x[name]) for name in STATE}
    o, final = call(x, backend="reference")
    state = tuple(x[name].clone() for name in STATE)
    addresses = [t.data_ptr() for t in state]
    steps = [mlstm_step(*(x[name][:, t] for name in "qkvif"), state) for t in range(17)]
    assert [t.data_ptr() for t in state] == addresses
    assert relative_rms(torch.stack(steps, 1), o) < 1e-10
    for ours, expected in zip(state, final, strict=True):
        assert relative_rms(ours, expected) < 1e-10


@pytest.mark.parametrize("level", [-200.0, -50.0, 0.0, 50.0, 85.0])
def test_input_gates_of_any_size(level):
    """e^level alone leaves float32; below the 1 in the denominator the output fades, above it settles."""
    inputs = draw_inputs(2, 1, 70, 2, 16, 16, gates=0.5)
    inputs["q"], inputs["k"] = inputs["q"].abs(), inputs["k"].abs()  # a denominator away from 0
    inputs["i"] += level
    ours, expected = run(inputs, torch.float32, "chunked"), run(inputs, torch.float64, "reference")
    assert all(torch.isfinite(x).all() for x in ours.values())
    if level > -80:
        assert relative_rms(ours["o"], expected["o"]) < 1e-5
    else:
        assert ours["o"].abs().max() < 1e-30
    zero = {**inputs, "q": torch.zeros_like(inputs["q"])}
    assert (call({name: value.float() for name, value in zero.items()})[0] == 0).all()


def test_long_memory_does_not_drift():
    """Rounding of m must not bias what a state keeps over thousands of tokens."""
    inputs = draw_inputs(3, 1, 4000, 1, 4, 4, gates=1.0, keep=9.0)
    inputs["q"], inputs["k"] = inputs["q"].abs(), inputs["k"].abs()
    inputs["i"] += 20
    o, _ = call(inputs, backend="reference")
    assert relative_rms(call({name: x.float() for name, x in inputs.items()})[0], o) < 2e-5


def test_tokens_can_be_skipped():
    x = draw_inputs(4, 1, 20, 2, 8, 8, states=1)
    o, state = call(x)
    gap = {
        name: torch.cat([v[:, :9], torch.zeros_like(v[:, :5]), v[:, 9:]], 1)
        for name, v in x.items()
        if name not in STATE
    }
    gap["i"][:, 9:14], gap["f"][:, 9:14] = -1e4, 1e4
    gap_o, gap_state = call({**gap, **{name: x[name] for name in STATE}})
    assert relative_rms(torch.cat([gap_o[:, :9], gap_o[:, 14:]], 1), o) < 1e-12
    for ours, expected in zip(gap_state, state, strict=True):
        assert relative_rms(ours, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_computed_in_float32(dtype):
    x = {name: v.to(dtype) for name, v in draw_inputs(5, 2, 65, 2, 16, 16, gates=1.0).items()}
    o, state = call(x)
    expected, _ = call({name: v.double() for name, v in x.items()}, backend="reference")
    assert o.dtype == dtype and {t.dtype for t in state} == {torch.float32}
    assert relative_rms(o, expected) < torch.finfo(dtype).eps


BASE = {name: value.float() for name, value in draw_inputs(0, 2, 4, 3, 8, 8).items()}
ZEROS = (torch.zeros(2, 3), torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, 8))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k": torch.zeros(2, 5, 3, 8)}, ValueError, ["k", "T=4"]),
        ({"i": torch.zeros(2, 4, 3, 8)}, ValueError, ["i", "3 dimensions"]),
        ({"f": torch.zeros(2, 4, 3, dtype=torch.int64)}, TypeError, ["f", "int64"]),
        ({"initial_state": (*ZEROS[:2], torch.zeros(2, 3, 7))}, ValueError, ["initial_state's n", "8"]),
        ({"initial_state": (ZEROS[0].to("meta"), *ZEROS[1:])}, ValueError, ["initial_state's m", "meta", "cpu"]),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, ["batch must be 1"]),
        ({"backend": "fast"}, ValueError, ["backend", "fast", "chunked"]),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    with pytest.raises(error) as caught:
        mlstm(**{**BASE, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_step_refuses_a_state_in_half_precision():
    token = [BASE[name][:, 0] for name in "qkvif"]
    with pytest.raises(TypeError, match="state's C has dtype"):
        mlstm_step(*token, (ZEROS[0], ZEROS[1].bfloat16(), ZEROS[2]))


def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked entries may overflow, as on a GPU
@pytest.mark.parametrize("initial", [False, True])
def test_interpreted_triton_is_the_recurrence(initial):
    inputs = draw_inputs(6, 1, 70, 2, 16, 16, 1 if initial else None, gates=1.0)
    inputs["q"], inputs["k"] = inputs["q"].abs(), inputs["k"].abs()
    assert_close(run(inputs, torch.float32, "triton"), run(inputs, torch.float64, "reference"), 2e-5)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted_triton_packed_and_step():
    inputs, bounds = draw_inputs(7, 1, 70, 1, 16, 16, 3, gates=1.0), torch.tensor([0, 30, 30, 70])
    inputs["q"], inputs["k"] = inputs["q"].abs(), inputs["k"].abs()
    expected = run(inputs, torch.float64, "reference", cu_seqlens=bounds)
    assert_close(run(inputs, torch.float32, "triton", cu_seqlens=bounds), expected, 2e-5)
    states = [tuple(inputs[name][:1].to(dtype) for name in STATE) for dtype in (torch.float32, torch.float64)]
    outputs = []
    for state, backend in zip(states, ("triton", "chunked"), strict=True):
        token = (inputs[name][:, 0].to(state[0].dtype) for name in "qkvif")
        outputs.append(mlstm_step(*token, state, backend=backend))
    assert relative_rms(*outputs) < 1e-5
    for ours, right in zip(*states, strict=True):
        assert relative_rms(ours, right) < 1e-5
