"""The delta rule's Triton kernels on a real GPU, in float32, float16 and bfloat16."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor

from linearize.kernels.delta_rule import delta_rule, delta_rule_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DECAYS = ["none", "scalar", "vector"]
# Against float64 on the same inputs. In 16 bits scores, the inverse, errors, states inside products and outputs are
# rounded.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.5e-3, torch.bfloat16: 1.6e-2}


def draw(
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    decay: str,
    dtype: torch.dtype,
    states: int | None = None,
    weakest: float = 1e-4,
    strongest: float = 50.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Keys of length 1, as mixers make them."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    inputs = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    inputs["k"] = torch.nn.functional.normalize(inputs["k"], dim=-1)
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    inputs["beta"] = normal(B, T, H).sigmoid()
    shapes = {"scalar": (B, T, H), "vector": (B, T, H, K)}
    if decay in shapes:
        low, high = math.log(weakest), math.log(strongest)
        exponent = torch.rand(shapes[decay], generator=generator, device="cuda") * (high - low) + low
        inputs["log_decay"] = -exponent.exp().clamp(weakest, strongest)
    if states is not None:
        inputs["initial_state"] = normal(states, H, K, V)
    return inputs


def poison() -> None:
    """Fill what the allocator will hand out next with NaN: outputs and workspaces must be written in full."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 26, 1 << 22, 1 << 20, 1 << 18, 1 << 16)]
    del blocks


def run(inputs: dict[str, Tensor], backend: str, double: bool = False, final: bool = True, **options):
    leaves = {name: (x.double() if double else x).detach().requires_grad_() for name, x in inputs.items()}
    if not double:
        poison()
    o, state = delta_rule(**leaves, output_final_state=final, backend=backend, **options)
    generator = torch.Generator("cuda").manual_seed(7)
    do = torch.randn(o.shape, generator=generator, device="cuda").to(inputs["q"].dtype).to(o.dtype)
    results, loss = {"o": o}, (o * do).sum()
    if final:
        dstate = torch.randn(state.shape, generator=generator, device="cuda").to(state.dtype)
        results["state"], loss = state, loss + (state * dstate).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results.update({f"d{name}": g for name, g in zip(leaves, gradients, strict=True)})
    return {name: x.detach() for name, x in results.items()}


def errors(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    result = {}
    for name, expected in reference.items():
        assert ours[name].shape == expected.shape, name
        assert torch.isfinite(ours[name]).all(), name
        size = expected.double().norm()
        error = (ours[name].double() - expected.double()).norm()
        result[name] = float(error / size) if size > 0 else float(error)
    return result


def compare(inputs: dict[str, Tensor], tolerance: float | None = None, **options) -> None:
    tolerance = tolerance or TOLERANCE[inputs["q"].dtype]
    # The chunked form in float64 is the loop to 1e-12 (tests/kernels) and much faster.
    found = errors(run(inputs, "triton", **options), run(inputs, "chunked", double=True, **options))
    assert all(error <= tolerance for error in found.values()), found


# Compiling takes most of this suite's time: cases share their kernels where they can, and the decay varies slowest, so
# that cases that share them run in the same worker.
@pytest.mark.parametrize(
    ("dtype", "T"),
    [(torch.float32, T) for T in (15, 65)]
    + [(torch.float16, T) for T in (63, 1000)]
    + [(torch.bfloat16, T) for T in (1, 2, 63, 64, 65, 1000, 2048)],
    ids=str,
)
@pytest.mark.parametrize("decay", DECAYS)
def test_lengths(dtype, T, decay):
    compare(draw(2, T, 2, 64, 64, decay, dtype, states=2))


WIDTHS = [(16, 256), (60, 100), (100, 16), (128, 128), (256, 64), (256, 256), (64, 512)]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(
    ("dtype", "K", "V"),
    [(torch.bfloat16, *pair) for pair in WIDTHS] + [(torch.float16, 60, 100), (torch.float32, 128, 64)],
    ids=str,
)
def test_widths_and_every_launch_in_the_table(K, V, decay, dtype):
    compare(draw(1, 130, 2, K, V, decay, dtype, states=1, seed=K + V))


@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0, 3.0, 9.0, 50.0])
@pytest.mark.parametrize(
    ("dtype", "decay"),
    [(torch.bfloat16, "scalar"), (torch.bfloat16, "vector"), (torch.float32, "vector")],
    ids=str,
)
def test_one_decay_strength(dtype, decay, strength):
    compare(draw(1, 500, 2, 64, 64, decay, dtype, states=1, weakest=strength, strongest=strength))


@pytest.mark.parametrize("decay", DECAYS)
def test_equal_keys(decay):
    """The worst-conditioned chunk."""
    x = draw(1, 300, 2, 64, 64, decay, torch.float32, strongest=0.1)
    x["k"][:] = x["k"][:, :1]
    compare(x)


@pytest.mark.parametrize("decay", DECAYS)
def test_many_heads_and_sequences(decay, dtype=torch.bfloat16):
    compare(draw(3, 700, 12, 128, 128, decay, dtype, strongest=1.0))


@pytest.mark.parametrize("decay", DECAYS)
def test_packed(decay, dtype=torch.bfloat16):
    bounds = torch.tensor([0, 0, 1, 64, 64, 129, 130, 1000, 1000], device="cuda")
    compare(draw(1, 1000, 3, 64, 128, decay, dtype, states=8), cu_seqlens=bounds)
    compare(draw(1, 1000, 3, 64, 128, decay, dtype), cu_seqlens=bounds, final=False)


@pytest.mark.parametrize("decay", DECAYS)
def test_strided_inputs(decay, dtype=torch.bfloat16):
    x = draw(2, 200, 3, 64, 64, decay, dtype)
    packed = torch.stack([x["q"], x["k"], x["v"]], 2)
    x["q"], x["k"] = packed[:, :, 0], packed[:, :, 1]
    x["v"] = x["v"].transpose(1, 2).contiguous().transpose(1, 2)
    x["beta"] = x["beta"].transpose(1, 2).contiguous().transpose(1, 2)
    compare(x)


def plain(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None) -> Tensor:
    """One triangular system over the whole sequence, every step but the solve in the inputs' dtype."""
    dtype, T = q.dtype, q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = torch.ones(T, T, dtype=torch.bool, device="cuda").tril()
    P, A = q @ k.mT, k @ k.mT
    if g is not None:
        G = g.transpose(1, 2).cumsum(2)
        decay = torch.where(seen, G[..., None] - G[:, :, None], float("-inf")).exp().to(dtype)
        P, A = P * decay, A * decay
    beta = beta.transpose(1, 2).to(dtype)[:, :, None]
    system = torch.eye(T, device="cuda") + (A * beta).tril(-1).float()
    r = torch.linalg.solve_triangular(system, v.float(), upper=False, unitriangular=True).to(dtype)
    return ((P * beta).masked_fill(~seen, 0) @ r * q.shape[-1] ** -0.5).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", ["none", "scalar"])
@pytest.mark.parametrize("T", [130])
def test_at_most_twice_the_error_of_plain_torch(T, decay, dtype):
    x = draw(2, T, 2, 64, 64, decay, dtype)
    reference = run(x, "chunked", double=True, final=False)
    ours = errors(run(x, "triton", final=False), reference)
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    o = plain(leaves["q"], leaves["k"], leaves["v"], leaves["beta"], leaves.get("log_decay"))
    do = torch.randn(o.shape, generator=torch.Generator("cuda").manual_seed(7), device="cuda").to(dtype)
    gradients = torch.autograd.grad((o * do).sum(), list(leaves.values()))
    theirs = errors({"o": o, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}, reference)
    assert all(ours[name] <= 2 * theirs[name] for name in theirs), (ours, theirs)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 4096), (60, 100)])
def test_step(K, V, decay):
    x = draw(2, 1, 3, K, V, decay, torch.bfloat16, states=2)
    initial = x.pop("initial_state")
    token = {name: value[:, 0] for name, value in x.items()}
    results = []
    for backend in ("triton", "reference"):
        state = initial.clone()
        results.append((delta_rule_step(**token, state=state, backend=backend), state))
    (o, state), (expected_o, expected_state) = results
    assert (state - expected_state).norm() <= 1e-6 * expected_state.norm()
    assert (o.float() - expected_o.float()).norm() <= 5e-3 * expected_o.float().norm()


@pytest.mark.parametrize("decay", ["none", "vector"])
def test_cuda_graph(decay):
    x = draw(1, 256, 2, 64, 64, decay, torch.bfloat16)
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    do = torch.randn_like(x["v"])

    def both() -> tuple[Tensor, ...]:
        o, _ = delta_rule(**leaves)
        return (o, *torch.autograd.grad(o, list(leaves.values()), do))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
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
        assert torch.equal(ours, t)


@pytest.mark.parametrize("decay", DECAYS)
def test_compile_checkpoint_autocast(decay):
    x = draw(1, 256, 2, 64, 64, decay, torch.bfloat16, strongest=1.0)
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}

    def loss(*inputs: Tensor) -> Tensor:
        return delta_rule(*inputs)[0].float().square().sum()

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


def test_no_host_synchronisation():
    x = draw(1, 256, 2, 64, 64, "vector", torch.bfloat16)
    bounds = torch.tensor([0, 100, 256], device="cuda")
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    for cu_seqlens in (None, bounds):
        delta_rule(**leaves, cu_seqlens=cu_seqlens)[0].sum().backward()  # compiled before it is watched
        torch.cuda.set_sync_debug_mode("error")
        try:
            delta_rule(**leaves, cu_seqlens=cu_seqlens)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_runs_are_equal_bit_for_bit():
    x = draw(2, 500, 2, 64, 64, "scalar", torch.bfloat16)
    first, second = run(x, "triton"), run(x, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("decay", DECAYS)
def test_first_call_takes_seconds(decay, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = draw(1, 256, 7, 128, 128, decay, torch.bfloat16)  # seven heads: shapes no other test has compiled
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    began = time.perf_counter()
    delta_rule(**leaves)[0].sum().backward()
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 20
