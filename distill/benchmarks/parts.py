"""Single parts of one layer, and the loss, on a GPU: what each takes alone, without the host's launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from linearize.convert.attention_spec import find_layers
from linearize.convert.surgery import student_mixers
from linearize.distill.fused_norms import fused
from linearize.distill.losses import normalized_error
from linearize.distill.reference import Head
from linearize.kernels.bench import time_ms
from linearize.kernels.linear_loss import linear_kl

if TYPE_CHECKING:
    from linearize.distill.benchmarks.training import Bench

_REPEATS = 10


def time_parts(bench: Bench) -> dict[str, tuple[float, float]]:
    """Milliseconds of the forward pass, and of forward and backward, of parts of the middle layer."""
    student, settings = bench.student, bench.settings
    blocks = find_layers(student, student.config)[0]
    block: Any = blocks[len(blocks) // 2]
    mixers = student_mixers(student)
    mixer = mixers[len(mixers) // 2]
    shape = settings.batch_size, settings.context, student.config.hidden_size
    x = torch.randn(shape, device=bench.device, dtype=settings.dtype)
    target = torch.randn_like(x)
    positions = torch.arange(settings.context, device=bench.device)[None]
    rope = student.get_decoder().rotary_emb(x, positions)
    teacher = mixer.attention
    runs: dict[str, tuple[Any, list[torch.Tensor]]] = {
        "norm": (block.input_layernorm, [x]),
        "norm, fused": (fused(block.input_layernorm), [x]),
        "MLP": (block.mlp, [x]),
        "teacher's attention": (lambda x: teacher(x, position_embeddings=rope, attention_mask=None)[0], [x]),
        "mixer": (lambda x: mixer(x, position_embeddings=rope)[0], [x]),
        "mixer without projections": _core(mixer, x, rope),
        "transfer's error": (lambda x: normalized_error(x, target), [x]),
    }
    found = {}
    for part, (run, inputs) in runs.items():
        found[part] = _times(run, inputs)
    found["loss"] = _loss(bench, x.flatten(0, 1))
    student.zero_grad()
    return found


def _times(run: Any, inputs: list[torch.Tensor]) -> tuple[float, float]:
    """Milliseconds without gradients, and with those of the inputs and of what trains."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    gradient = torch.randn_like(run(*leaves))

    def forward() -> None:
        with torch.no_grad():
            run(*inputs)

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(run(*leaves), gradient)

    return time_ms(forward, _REPEATS), time_ms(both, _REPEATS)


def _core(mixer: Any, x: torch.Tensor, rope: Any) -> tuple[Any, list[torch.Tensor]]:
    """The mixer on projections that are there already."""
    with torch.no_grad():
        q, k, v = mixer.project(x)

    def run(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mixer.project = lambda _: (q, k, v)
        try:
            return mixer.mix(x, rope, None, None)[0]
        finally:
            del mixer.project

    return run, [x, q, k, v]


def _loss(bench: Bench, hidden: torch.Tensor) -> tuple[float, float]:
    """KL and cross-entropy towards other hidden states of the same head."""
    head = Head.of(bench.student)
    other = torch.randn_like(hidden)
    labels = torch.randint(head.weight.shape[0], hidden.shape[:1], device=hidden.device)

    def run(hidden: torch.Tensor) -> torch.Tensor:
        return linear_kl(hidden, head.weight, other, head.weight, labels=labels, ce_weight=0.02).loss

    return _times(run, [hidden])
