"""Which layers, or groups of heads, should keep softmax: those whose replacement costs most.

The cost of one replacement is the KL divergence from the teacher when it alone is made in an otherwise exact teacher
(the marginal KL, as HALO ranks layers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.calibration import routed, teacher_heads, teacher_route
from linearize.convert.errors import ConversionError
from linearize.convert.mixers import Mixer
from linearize.convert.plan import KEEP, LayerPlan, Plan
from linearize.convert.surgery import student_mixers
from linearize.distill.progress import meter

Route = Callable[..., tuple[torch.Tensor, None]]
Unit = tuple[Mixer, tuple[int, ...] | None]
"""A mixer, and the heads of it that are replaced; None for all."""


@dataclass(frozen=True)
class Replacement:
    """One replacement in an exact teacher.

    Attributes:
        layer: index of the decoder block.
        heads: the query heads that were replaced; None for the whole layer.
        kl: KL(teacher ‖ teacher with this replacement), nats per token.
    """

    layer: int
    heads: tuple[int, ...] | None
    kl: float


def rank_layers(student: PreTrainedModel, input_ids: torch.Tensor, batch_size: int = 4) -> list[Replacement]:
    """The marginal KL of every converted layer, in layer order.

    Args:
        student: after surgery (calibrated, or the ranking is that of bad starts).
        input_ids: `[N, T]`.
    """
    units: list[Unit] = [(mixer, None) for mixer in student_mixers(student)]
    return _rank(student, input_ids, units, batch_size)


def rank_heads(student: PreTrainedModel, input_ids: torch.Tensor, batch_size: int = 4) -> list[Replacement]:
    """The marginal KL of every group of query heads that share a kv head: what a cache keeps or drops together."""
    units: list[Unit] = [
        (mixer, tuple(range(group * mixer.spec.group, (group + 1) * mixer.spec.group)))
        for mixer in student_mixers(student)
        for group in range(mixer.spec.num_kv_heads)
    ]
    return _rank(student, input_ids, units, batch_size)


@torch.no_grad()
def _rank(
    student: PreTrainedModel,
    input_ids: torch.Tensor,
    units: list[Unit],
    batch_size: int,
) -> list[Replacement]:
    if not units:
        raise ConversionError("no layer of this plan is converted; there is nothing to rank")
    mixers = student_mixers(student)
    device = next(student.parameters()).device
    sums = [0.0] * len(units)
    batches = input_ids.split(batch_size)
    training = student.training
    student.eval()
    with meter("rank", len(batches) * len(units)) as progress:
        for i, ids in enumerate(batches):
            ids = ids.to(device)
            with routed(mixers, teacher_route):
                teacher = _log_probs(student, ids)
            for j, (mixer, heads) in enumerate(units):
                others = [m for m in mixers if m is not mixer]
                with routed(others, teacher_route), routed([mixer], _some_heads(heads)):
                    replaced = _log_probs(student, ids)
                sums[j] += float((teacher.exp() * (teacher - replaced)).sum())
                progress.update(i * len(units) + j + 1, ids.numel())
    student.train(training)
    return [
        Replacement(mixer.layer_idx, heads, total / input_ids.numel())
        for (mixer, heads), total in zip(units, sums, strict=True)
    ]


def _log_probs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits.log_softmax(-1, dtype=torch.float32)


def _some_heads(replaced: tuple[int, ...] | None) -> Route:
    """Route of a mixer that takes the place of some heads only; None for all of them."""

    def route(mixer: Mixer, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        kwargs = {**kwargs, "past_key_values": None}
        if replaced is None:
            return mixer.attend(hidden_states, **kwargs)
        _, exact = teacher_heads(mixer, hidden_states, **kwargs)
        heads, _ = mixer.mix(hidden_states, kwargs.get("position_embeddings"), None, None)
        mixed = exact.clone()
        mixed[:, :, list(replaced)] = heads[:, :, list(replaced)].to(exact.dtype)
        return mixer.output(mixed), None

    return route


def keep_costliest(plan: Plan, ranked: list[Replacement], share: float) -> Plan:
    """The plan with softmax kept where replacing it costs most.

    Args:
        ranked: of every converted layer, or of every group of heads.
        share: how much of the ranked units keeps softmax, from 0 to 1.

    Returns:
        Whole layers become `keep`; groups of heads make their layer a `head-hybrid`.
    """
    if not 0 <= share <= 1:
        raise ConversionError(f"--keep {share:.0%} is no share; give one from 0% to 100%")
    kept = sorted(ranked, key=lambda unit: unit.kl, reverse=True)[: round(share * len(ranked))]
    layers = list(plan.layers)
    for index in {unit.layer for unit in kept}:
        mine = [unit for unit in kept if unit.layer == index]
        whole = len(mine) == sum(unit.layer == index for unit in ranked)
        layers[index] = _keep(layers[index], None if whole else sorted(h for unit in mine for h in unit.heads or ()))
    return Plan(tuple(layers))


def _keep(layer: LayerPlan, heads: list[int] | None) -> LayerPlan:
    if heads is None:
        return LayerPlan(KEEP, {}, layer.ffn, layer.ffn_options)
    options = {"softmax_heads": heads, "mixer": layer.mixer, "options": layer.options}
    return LayerPlan("head-hybrid", options, layer.ffn, layer.ffn_options)
