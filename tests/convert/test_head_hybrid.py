"""Layers of which some heads stay softmax: those equal the teacher's, the others the other mixer's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linearize.convert import ConversionError, build_student
from linearize.convert.attention_spec import kv_bytes
from linearize.convert.calibration import teacher_heads
from linearize.convert.mixers.head_hybrid import join_heads, take_heads
from linearize.convert.verify import relative_error
from tests.families import FAMILIES, random_teacher

EQUAL = 2e-5
families = pytest.mark.parametrize("family", sorted(FAMILIES))


def tokens(batch: int = 2, length: int = 30) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def hybrid(family: str, heads: Any, mixer: str = "swa", **options: Any) -> Any:
    teacher = random_teacher(family, num_hidden_layers=2)
    return teacher, build_student(teacher, "head-hybrid", softmax_heads=heads, mixer=mixer, options=options)


def layer_input(student: Any) -> tuple[torch.Tensor, Any]:
    x = torch.randn(2, 30, 64, generator=torch.Generator().manual_seed(5))
    return x, student.get_decoder().rotary_emb(x, torch.arange(30)[None])


@families
@torch.no_grad()
def test_with_all_heads_softmax_it_is_the_teacher(family: str) -> None:
    teacher, student = hybrid(family, 1.0)
    expected, cache = teacher(input_ids=tokens(), use_cache=False).logits, student.new_cache()
    assert relative_error(student(input_ids=tokens(), use_cache=False).logits, expected) < EQUAL
    pieces = tokens().split([17, 1, 12], 1)
    made = [student(input_ids=p, past_key_values=cache, use_cache=True).logits for p in pieces]
    assert relative_error(torch.cat(made, 1), expected) < EQUAL
    assert not student.mixers[0].new_parameters()


@families
@pytest.mark.parametrize("heads", [[0, 3], [1], [0, 1], [2, 3], [1, 2, 3], []])
@torch.no_grad()
def test_each_head_is_the_teachers_or_the_other_mixers(family: str, heads: list[int]) -> None:
    teacher, student = hybrid(family, heads, window=5)
    whole = build_student(teacher, "swa", window=5).mixers[0]
    mixer, (x, rope) = student.mixers[0], layer_input(student)
    mask = torch.full((30, 30), torch.finfo(torch.float32).min).triu(1)
    if mixer.spec.sliding_window:
        mask += torch.full((30, 30), torch.finfo(torch.float32).min).tril(-mixer.spec.sliding_window)
    mask = mask.clamp_min(torch.finfo(torch.float32).min)[None, None]
    _, exact = teacher_heads(mixer, x, position_embeddings=rope, attention_mask=mask)
    other = whole.mix(x, rope, None, None)[0]
    made = mixer.mix(x, rope, None, None)[0]
    for head in range(4):
        expected = exact if head in heads else other
        assert relative_error(made[:, :, head], expected[:, :, head]) < EQUAL
    assert relative_error(exact, other) > 0.01


@torch.no_grad()
def test_the_other_mixer_is_built_for_its_heads_and_only_softmax_heads_are_cached() -> None:
    _, student = hybrid("llama", [0, 1], "gla", window=4)
    mixer = student.mixers[0]
    whole = build_student(random_teacher("llama", num_hidden_layers=2), "gla", window=4).mixers[0]
    assert mixer.inner.recurrence.state_shapes()["memory"] == (2, 16, 16)
    assert mixer.inner.spec.num_kv_heads == 1
    assert (
        0
        < sum(p.numel() for p in mixer.new_parameters().values())
        < sum(p.numel() for p in whole.new_parameters().values())
    )
    cache = student.new_cache()
    student(input_ids=tokens(), past_key_values=cache, use_cache=True)
    assert cache.layers[0].state["key"].shape == (2, 30, 1, 16)
    grown = mixer.state_bytes(2000, torch.float32) - mixer.state_bytes(1000, torch.float32)
    per_token = kv_bytes(mixer.spec, 1, 4)
    assert grown == 1000 * (per_token // 2 + 1)


def test_the_projections_run_once_and_adapters_on_them_reach_both_kinds_of_head() -> None:
    _, student = hybrid("llama", [0], "gla", window=4)
    mixer, (x, rope) = student.mixers[0], layer_input(student)
    calls = []
    mixer.v_proj.register_forward_hook(lambda *_: calls.append(1))
    before = mixer.mix(x, rope, None, None)[0]
    assert len(calls) == 1
    mixer.v_proj = torch.nn.Sequential(mixer.v_proj, torch.nn.Linear(32, 32))
    after = mixer.mix(x, rope, None, None)[0]
    assert all(relative_error(after[:, :, head], before[:, :, head]) > 0.01 for head in range(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softmax_heads": [4]}, "no head 4"),
        ({"softmax_heads": 0.0}, "share above 0"),
        ({"mixer": "softmax"}, "no recurrent mixer"),
        ({"mixer": "head-hybrid"}, "no recurrent mixer"),
        ({"mixer": "gla", "options": {"widow": 4}}, "widow"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        build_student(random_teacher("llama", num_hidden_layers=2), "head-hybrid", **options)


@pytest.mark.parametrize(("share", "heads"), [(0.01, [0, 1]), (0.5, [0, 1]), (1.0, [0, 1, 2, 3])])
def test_a_share_is_of_kv_heads(share: float, heads: list[int]) -> None:
    assert hybrid("llama", share)[1].mixers[0].softmax_heads == heads


@given(st.permutations(range(6)), st.integers(0, 6))
@settings(max_examples=30)
def test_heads_that_were_divided_are_joined_in_order(order: list[int], cut: int) -> None:
    x = torch.randn(1, 2, 6, 3)
    parts = [(sorted(part), take_heads(x, sorted(part))) for part in (order[:cut], order[cut:]) if part]
    assert torch.equal(join_heads(parts), x)
    assert torch.equal(take_heads(x, order), x[:, :, order])
