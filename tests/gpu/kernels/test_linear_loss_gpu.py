"""Losses from hidden states and heads on a real GPU, in float32, float16 and bfloat16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.kernels.linear_loss import linear_cross_entropy, linear_kl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Against float64 on the same inputs. In 16 bits products, slopes and gradients are rounded.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def draw(N: int, D: int, V: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    inputs = {"hidden": normal(N, D), "weight": normal(V, D) * D**-0.5, "bias": normal(V)}
    inputs |= {"teacher_hidden": normal(N, D), "teacher_weight": normal(V, D) * D**-0.5}
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    labels = torch.randint(V, (N,), generator=generator, device="cuda")
    return inputs | {"labels": labels.masked_fill(torch.rand(N, generator=generator, device="cuda") < 0.2, -100)}


def poison() -> None:
    """Fill what the allocator will hand out next with NaN: outputs and workspaces must be written in full."""
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 26, 1 << 22, 1 << 20, 1 << 18, 1 << 16)]
    del blocks


def run(inputs: dict[str, Tensor], backend: str, double: bool = False, **options) -> dict[str, Tensor]:
    x = {name: t.double() if double and t.is_floating_point() else t for name, t in inputs.items()}
    trained = {name: x[name].detach().requires_grad_() for name in ("hidden", "weight", "bias")}
    if not double:
        poison()
    found = linear_kl(**{**x, **trained}, backend=backend, **options)
    gradients = torch.autograd.grad(found.loss, list(trained.values()))
    return found._asdict() | {f"d{name}": g for name, g in zip(trained, gradients, strict=True)}


def errors(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    result = {}
    for name, expected in reference.items():
        assert torch.isfinite(ours[name]).all(), name
        difference = (ours[name].detach().double() - expected.detach().double()).norm()
        result[name] = float(difference / expected.detach().double().norm().clamp_min(1e-30))
    return result


CASES = [
    # N, D, vocab, chunk, dtype, options
    (1, 64, 1000, None, torch.float32, {}),
    (300, 128, 50257, 128, torch.float32, {"direction": "reverse"}),
    (300, 128, 4096, 77, torch.float32, {"temperature": 2.0, "softcap": 5.0, "logit_scale": 0.5}),
    (300, 100, 1003, 77, torch.float16, {"direction": "reverse", "temperature": 0.5}),
    (1025, 256, 32000, 512, torch.float16, {}),
    (1025, 256, 50257, 512, torch.bfloat16, {}),
    (300, 128, 4096, 77, torch.bfloat16, {"softcap": 5.0, "logit_scale": 0.5}),
    (300, 128, 32000, 300, torch.bfloat16, {"direction": "reverse"}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_the_formula(case):
    N, D, V, chunk_size, dtype, options = case
    inputs = draw(N, D, V, dtype)
    options = {"ce_weight": 0.5, **options}
    reference = run(inputs, "reference", double=True, **options)
    found = errors(run(inputs, "triton", chunk_size=chunk_size, **options), reference)
    assert all(error <= TOLERANCE[dtype] for error in found.values()), found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_at_most_twice_the_error_of_plain_torch(dtype):
    x = draw(500, 256, 32000, dtype)
    reference = run(x, "reference", double=True, ce_weight=0.5)
    ours = errors(run(x, "triton", ce_weight=0.5, chunk_size=200), reference)
    theirs = errors(run(x, "reference", ce_weight=0.5), reference)
    gradients = [name for name in theirs if name.startswith("d")]
    assert all(ours[name] <= 2 * theirs[name] for name in gradients), (ours, theirs)


@pytest.mark.parametrize("train_head", [False, True])
def test_memory_is_bounded(train_head):
    N, D, V, chunk = 4096, 256, 128256, 512
    x = draw(N, D, V, torch.bfloat16)
    hidden, weight = x["hidden"].requires_grad_(), x["weight"].requires_grad_(train_head)
    linear_cross_entropy(hidden[:8], weight, x["labels"][:8]).backward()  # workspaces of the matrix products
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, x["labels"], chunk_size=chunk).backward()
    extra = torch.cuda.max_memory_allocated() - before
    # One chunk of logits; the gradient of hidden twice; the head's in float32, scaled, and in its dtype.
    bound = 2 * chunk * V + 2 * 2 * N * D + (4 + 4 + 2) * V * D * train_head
    assert extra <= 1.1 * bound + (8 << 20), (extra, bound)
    assert extra < 2 * N * V


@pytest.mark.parametrize("labels", [False, True])
def test_cuda_graph_and_no_host_synchronisation(labels):
    x = draw(300, 128, 4096, torch.bfloat16)
    options = {"labels": x.pop("labels"), "ce_weight": 0.5} if labels else {"labels": x.pop("labels") * 0}
    trained = [x[name].requires_grad_() for name in ("hidden", "weight")]

    def both() -> tuple[Tensor, ...]:
        loss = linear_kl(**x, **options, chunk_size=100).loss
        return (loss, *torch.autograd.grad(loss, trained))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = [t.clone() for t in both()]
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = both()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))  # bit for bit
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for t in captured:
        t.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for ours, t in zip(captured, expected, strict=True):
        assert torch.equal(ours, t)


def test_compile_checkpoint_autocast():
    x = draw(300, 128, 4096, torch.bfloat16)
    trained = [x.pop(name).requires_grad_() for name in ("hidden", "weight")]

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_kl(hidden, weight, **x, ce_weight=0.5).loss

    expected = torch.autograd.grad(loss(*trained), trained)
    ways = [
        torch.compile(loss, fullgraph=True)(*trained),
        torch.utils.checkpoint.checkpoint(loss, *trained, use_reentrant=False),
    ]
    with torch.autocast("cuda", torch.bfloat16):
        ways.append(loss(*(value.float() for value in trained)))
    for way in ways:
        for ours, t in zip(torch.autograd.grad(way, trained), expected, strict=True):
            assert (ours - t).float().norm() <= 1e-2 * t.float().norm()


def test_offsets_beyond_32_bits():
    """A chunk whose logits number more than 2^31."""
    N, V = 17000, 128256
    hidden = torch.randn(N, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(V, 64, device="cuda", dtype=torch.bfloat16) / 8
    labels = torch.randint(V, (N,), device="cuda")
    whole = linear_cross_entropy(hidden, weight, labels, chunk_size=N)
    (ours,) = torch.autograd.grad(whole, hidden)
    part = hidden.detach()[-100:].requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy((part @ weight.T).float(), labels[-100:]), part)
    error = (ours[-100:].float() * N / 100 - expected.float()).norm() / expected.float().norm()
    assert error <= 1.2e-2
