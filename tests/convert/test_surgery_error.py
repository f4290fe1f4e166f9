"""The distance of an untrained student from its teacher, against the same numbers computed from two models."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from linearize.convert import build_student
from linearize.convert.surgery_error import surgery_error
from tests.families import random_teacher

IDS = torch.randint(2, 64, (3, 20), generator=torch.Generator().manual_seed(1))


def test_the_identity_has_no_error() -> None:
    error = surgery_error(build_student(random_teacher("llama"), "softmax:0-2,keep:3"), IDS)
    assert list(error.layers) == [0, 1, 2] and error.attention < 1e-6 and error.logits < 1e-6
    assert abs(error.kl) < 1e-6 and error.perplexity_ratio == pytest.approx(1)


@torch.no_grad()
def test_it_is_what_two_models_side_by_side_say() -> None:
    teacher = random_teacher("llama")
    student = build_student(teacher, "swa", window=3, keep_softmax="2")
    error = surgery_error(student, IDS, batch_size=2)

    outputs: dict[str, list[torch.Tensor]] = {"teacher": [], "student": []}
    for who, model in (("teacher", teacher), ("student", student)):
        hook = model.model.layers[0].self_attn.register_forward_hook(
            lambda *call, who=who: outputs[who].append(call[-1][0])
        )
        outputs[f"{who} logits"] = [model(input_ids=IDS, use_cache=False).logits]
        hook.remove()
    first = (outputs["student"][0] - outputs["teacher"][0]).norm() / outputs["teacher"][0].norm()
    mine, theirs = outputs["student logits"][0], outputs["teacher logits"][0]
    a, b = (x - x.mean(-1, keepdim=True) for x in (mine, theirs))
    kl = F.kl_div(mine[:, :-1].log_softmax(-1), theirs[:, :-1].log_softmax(-1), log_target=True, reduction="none")
    losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()) for x in (mine, theirs)]

    assert list(error.layers) == [0, 1, 3]
    assert error.layers[0] == pytest.approx(float(first), rel=1e-4)
    assert error.logits == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-4)
    assert error.kl == pytest.approx(float(kl.sum(-1).mean()), rel=1e-4)
    assert error.perplexity_ratio == pytest.approx(math.exp(float(losses[0] - losses[1])), rel=1e-4)
    assert error.attention == pytest.approx(math.sqrt(sum(e * e for e in error.layers.values()) / 3))
    assert error.tokens == 60 and error.layers[0] > 0.01


@torch.no_grad()
def test_a_layer_is_measured_at_the_teachers_own_input() -> None:
    """Converting the first layer changes nothing in what is said of the second."""
    both = surgery_error(build_student(random_teacher("llama"), "swa:0-1,keep:2-3", window=3), IDS)
    second = surgery_error(build_student(random_teacher("llama"), "swa:1,keep:0,2-3", window=3), IDS)
    assert both.layers[1] == pytest.approx(second.layers[1], rel=1e-6)


def test_it_says_what_a_form_cannot_hold() -> None:
    student = build_student(random_teacher("llama"), "ska:0-1,swa:2-3", calibration=IDS)
    residuals = surgery_error(student, IDS).residuals
    assert list(residuals) == [0, 1] and all(0 < share < 1 for share in residuals.values())
