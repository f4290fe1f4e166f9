"""Ranking layers and heads: the numbers equal students that make one replacement, and the plan keeps the costliest."""

from __future__ import annotations

import pytest
import torch

from linearize.convert import build_student
from linearize.convert.errors import ConversionError
from linearize.convert.plan import KEEP, LayerPlan, Plan
from linearize.distill.selection import Replacement, keep_costliest, rank_heads, rank_layers
from tests.families import random_teacher

IDS = torch.randint(2, 64, (3, 40), generator=torch.Generator().manual_seed(0))


def _kl(teacher: torch.nn.Module, student: torch.nn.Module) -> float:
    with torch.no_grad():
        p, q = (model(input_ids=IDS, use_cache=False).logits.double().log_softmax(-1) for model in (teacher, student))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_marginal_kl_is_that_of_a_student_with_one_layer_replaced(family: str) -> None:
    teacher = random_teacher(family)
    plan = Plan((LayerPlan("swa", {"window": 4}), LayerPlan(KEEP), *[LayerPlan("swa", {"window": 4})] * 2))
    ranked = rank_layers(build_student(teacher, plan), IDS, batch_size=2)
    assert [unit.layer for unit in ranked] == [0, 2, 3]
    for unit in ranked:
        alone = [LayerPlan("swa", {"window": 4}) if i == unit.layer else LayerPlan(KEEP) for i in range(4)]
        wanted = _kl(teacher, build_student(teacher, Plan(tuple(alone))))
        assert unit.heads is None and wanted > 1e-4
        assert unit.kl == pytest.approx(wanted, rel=1e-3)


def test_heads_that_share_a_kv_head_are_ranked_together() -> None:
    teacher = random_teacher("llama")  # 4 query heads, 2 kv heads
    student = build_student(teacher, "swa", window=4)
    ranked = rank_heads(student, IDS)
    assert [(unit.layer, unit.heads) for unit in ranked] == [(i, h) for i in range(4) for h in ((0, 1), (2, 3))]
    # The other group made blind to everything but the window changes nothing in this one's number.
    layer = teacher.model.layers[2].self_attn
    with torch.no_grad():
        layer.o_proj.weight[:, : 2 * layer.head_dim] = 0  # heads 0 and 1 no longer reach the output
    again = rank_heads(student, IDS)
    assert again[4].kl < 1e-6 < again[5].kl
    assert again[5].kl == pytest.approx(rank_layers(student, IDS)[2].kl, rel=1e-3)


def test_the_plan_keeps_the_costliest() -> None:
    plan = Plan(tuple(LayerPlan("rodimus", {"window": 8}) for _ in range(4)))
    ranked = [Replacement(i, None, kl) for i, kl in enumerate([0.1, 0.5, 0.3, 0.2])]
    assert keep_costliest(plan, ranked, 0.5).kept == [1, 2]
    heads = [Replacement(i, h, kl) for (i, h), kl in zip(
        [(0, (0, 1)), (0, (2, 3)), (1, (0, 1)), (1, (2, 3))], [0.9, 0.1, 0.8, 0.7], strict=True)]  # fmt: skip
    kept = keep_costliest(plan, heads, 0.75)
    assert kept.layers[0] == LayerPlan(
        "head-hybrid", {"softmax_heads": [0, 1], "mixer": "rodimus", "options": {"window": 8}}
    )
    assert kept.layers[1].kept and kept.layers[2:] == plan.layers[2:]
    with pytest.raises(ConversionError, match="no share"):
        keep_costliest(plan, ranked, 1.5)


def test_nothing_to_rank_is_an_error() -> None:
    student = build_student(random_teacher("llama"), Plan((LayerPlan(KEEP),) * 4))
    with pytest.raises(ConversionError, match="nothing to rank"):
        rank_layers(student, IDS)
