"""How a hybrid uses its two branches: the window alone, the recurrence alone, both; and what the window cannot see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from linearize.convert.calibration import CalibrationSample, attention_logits, routed, teacher_route
from linearize.convert.mixers import Mixer
from linearize.convert.surgery import build_student, student_mixers
from linearize.distill.evaluate.positions import token_losses
from linearize.distill.progress import meter

Use = Literal["both", "window", "recurrence"]
USES: tuple[Use, ...] = ("both", "window", "recurrence")


@dataclass(frozen=True)
class LayerUse:
    """One hybrid layer.

    Attributes:
        window: its keys.
        mass_outside: per head, the share of the teacher's softmax that lies on keys before the window, the mean over
            the queries that have such keys.
        recurrent_share: `‖both - window‖² / ‖both‖²` of the heads, on the student's own activations: how much of the
            output is not the window's.
    """

    layer: int
    window: int
    mass_outside: list[float]
    recurrent_share: float


@dataclass(frozen=True)
class BranchUse:
    """All hybrid layers, and what the whole student loses with one branch.

    Attributes:
        loss: nats per token with "both", with the "window" or the "recurrence" alone in every hybrid layer.
        tokens: how many were predicted.
        context: tokens of one sequence.
    """

    loss: dict[Use, float]
    layers: list[LayerUse]
    tokens: int
    context: int


@contextlib.contextmanager
def using(mixers: list[Mixer], use: Use) -> Iterator[None]:
    """Let one branch of these mixers speak inside the context."""
    before = [mixer.use for mixer in mixers]
    for mixer in mixers:
        mixer.use = use
    try:
        yield
    finally:
        for mixer, previous in zip(mixers, before, strict=True):
            mixer.use = previous


def window_of(mixer: Mixer) -> int:
    """Keys of a mixer's window, 0 without one."""
    return int(getattr(mixer.options, "window", 0))


def hybrids(student: PreTrainedModel) -> list[Mixer]:
    """The mixers with a window whose branches can be told apart."""
    return [m for m in student_mixers(student) if m.separable and window_of(m)]


def branch_use(student: PreTrainedModel, teacher: PreTrainedModel, ids: torch.Tensor) -> BranchUse | None:
    """Measure on sequences `[N, T]`, one at a time; None when no layer is a hybrid.

    The teacher's logits `[H, T, T]` of a layer are held at once: keep T to a few thousand.
    """
    mixers = hybrids(student)
    if not mixers:
        return None
    loss: dict[Use, float] = {}
    for use in USES:
        with using(mixers, use), meter(f"branches, {use}", len(ids)) as progress:
            total = 0.0
            for i, row in enumerate(ids):
                total += float(token_losses(student, row[None], piece=row.numel()).double().sum())
                progress.update(i + 1, row.numel())
            loss[use] = total / ids[:, 1:].numel()
    mass = mass_outside(teacher, ids, {m.layer_idx: window_of(m) for m in mixers})
    share = recurrent_share(student, mixers, ids)
    layers = [LayerUse(m.layer_idx, window_of(m), mass[m.layer_idx], share[m.layer_idx]) for m in mixers]
    return BranchUse(loss, layers, ids[:, 1:].numel(), ids.shape[1])


@torch.no_grad()
def mass_outside(teacher: PreTrainedModel, ids: torch.Tensor, windows: dict[int, int]) -> dict[int, list[float]]:
    """Layer -> per head the teacher's softmax mass before the last `windows[layer]` keys; 0 where T ≤ the window."""
    probe = build_student(teacher, "softmax")  # the teacher's own tensors, in a shape that shows q and k
    sums: dict[int, torch.Tensor] = {}

    def route(mixer: Mixer, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        if (window := windows.get(mixer.layer_idx)) is not None:
            sample = CalibrationSample(hidden_states, kwargs.get("position_embeddings"), hidden_states)
            weights = attention_logits(mixer, sample).softmax(-1)
            outside = weights.tril(-window).sum(-1)[..., window:].double().sum((0, 2))
            sums[mixer.layer_idx] = sums.get(mixer.layer_idx, 0) + outside.cpu()
        return teacher_route(mixer, hidden_states, **kwargs)

    with routed(student_mixers(probe), route):
        for row in ids:
            probe.get_decoder()(input_ids=row[None].to(probe.device), use_cache=False)
    queries = {layer: max(1, len(ids) * (ids.shape[1] - window)) for layer, window in windows.items()}
    return {layer: (total / queries[layer]).tolist() for layer, total in sums.items()}


@torch.no_grad()
def recurrent_share(student: PreTrainedModel, mixers: list[Mixer], ids: torch.Tensor) -> dict[int, float]:
    """Layer -> `‖both - window‖² / ‖both‖²` of its heads over all tokens, on the student's own activations."""
    sums = {mixer.layer_idx: torch.zeros(2, dtype=torch.float64) for mixer in mixers}

    def route(mixer: Mixer, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        rope = kwargs.get("position_embeddings")
        both, _ = mixer.mix(hidden_states, rope, None, None)
        with using([mixer], "window"):
            window, _ = mixer.mix(hidden_states, rope, None, None)
        pair = torch.stack([(both - window).square().sum(), both.square().sum()])
        sums[mixer.layer_idx] += pair.double().cpu()
        return mixer.attend(hidden_states, **kwargs)

    with routed(mixers, route):
        for row in ids:
            student.get_decoder()(input_ids=row[None].to(student.device), use_cache=False)
    return {layer: float(moved / whole.clamp_min(1e-12)) for layer, (moved, whole) in sums.items()}
