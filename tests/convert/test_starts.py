"""Calibrated starts: heads take the best of those offered, and a shared key is exact where one key can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from linearize.convert import as_teacher, build_student
from linearize.convert.calibration import CalibrationSample, teacher_heads
from linearize.convert.mixers.deltanet import DeltaRule
from linearize.convert.surgery_error import surgery_error
from linearize.convert.verify import relative_error
from tests.families import random_teacher

IDS = torch.randint(2, 64, (2, 32), generator=torch.Generator().manual_seed(1))


def _sample(mixer: Any, student: Any) -> CalibrationSample:
    x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(5))
    rope = student.get_decoder().rotary_emb(x, torch.arange(40)[None])
    mask = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        _, heads = teacher_heads(mixer, x, position_embeddings=rope, attention_mask=mask)
    return CalibrationSample(x, rope, heads)


@torch.no_grad()
@pytest.mark.parametrize("window", [0, 6])
def test_every_head_takes_the_nearest_of_its_starts(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    student: Any = build_student(random_teacher("llama"), "deltanet", window=window)
    mixer = student.mixers[0]
    sample = _sample(mixer, student)

    def errors() -> torch.Tensor:
        mixer.calibrate(sample)
        heads, _ = mixer.mix(sample.hidden_states, sample.rope, None, None)
        return (heads - sample.heads).square().sum((0, 1, 3))

    best, chosen = errors(), mixer.recurrence.strength.bias.clone()
    alone, offered = [], mixer.recurrence.starts(None, torch.ones(4))[0]
    for start in offered:
        monkeypatch.setattr(DeltaRule, "starts", lambda *_, start=start: [[start]])
        alone.append(errors())
    lowest, which = torch.stack(alone).min(0)
    assert len(set(which.tolist())) > 1, "all heads take one start: the choice by head is not tested"
    assert torch.allclose(best, lowest, rtol=1e-4)
    assert torch.equal(chosen, torch.stack([start["strength.bias"] for start in offered])[which, torch.arange(4)])


@pytest.mark.parametrize("name", ["gated-deltanet", "gla", "mamba2"])
def test_a_pure_recurrence_weighs_mostly_positively(name: str) -> None:
    """Softmax's weights are positive. Weights that are as often negative start at an error of 0.95 here."""
    ids = torch.randint(2, 64, (4, 64), generator=torch.Generator().manual_seed(1))
    student = build_student(random_teacher("llama"), name, calibration=ids[:2], window=0)
    assert surgery_error(student, ids[2:]).attention < 0.88


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_a_shared_key_for_one_kv_head_equals_the_teacher(family: str) -> None:
    student: Any = build_student(random_teacher(family, num_key_value_heads=1), "ska", calibration=IDS, window=32)
    with as_teacher(student):
        expected = student(input_ids=IDS, use_cache=False).logits
    assert all(mixer.residual < 1e-5 for mixer in student.mixers)
    assert relative_error(student(input_ids=IDS, use_cache=False).logits, expected) < 1e-4


@torch.no_grad()
def test_a_shared_key_is_exact_where_heads_turn_one_key() -> None:
    """The second head's key is the first's, turned and scaled in each pair of channels that RoPE turns."""
    teacher = random_teacher("llama", num_hidden_layers=2)
    for layer in teacher.model.layers:
        first, second = layer.self_attn.k_proj.weight.view(2, 2, 8, -1)  # kv head, half of the channels, pair
        angle, size = torch.linspace(0, 3, 8)[:, None], torch.linspace(0.5, 2, 8)[:, None]
        second[0] = size * (angle.cos() * first[0] - angle.sin() * first[1])
        second[1] = size * (angle.sin() * first[0] + angle.cos() * first[1])
    student: Any = build_student(teacher, "ska", calibration=IDS, window=32)
    with as_teacher(student):
        expected = student(input_ids=IDS, use_cache=False).logits
    assert relative_error(student(input_ids=IDS, use_cache=False).logits, expected) < 1e-4


@torch.no_grad()
def test_a_shared_key_says_what_it_loses() -> None:
    """`residual` is the lost share of the logits' variance, for queries in all phases."""
    student: Any = build_student(random_teacher("llama", num_hidden_layers=2), "ska", window=4096)
    mixer = student.mixers[0]
    x = torch.randn(1, 3000, 64, generator=torch.Generator().manual_seed(5))
    rope = student.get_decoder().rotary_emb(x, torch.arange(3000)[None])
    mixer.calibrate(CalibrationSample(x, rope, x))
    q, k, _ = mixer.project(x)
    q = torch.randn(1, 3000, 4, 16, generator=torch.Generator().manual_seed(6)) * q.square().mean((0, 1)).sqrt()

    def logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q, k = mixer.rotate(q, k, rope)
        scores = torch.einsum(
            "thk,shk->hts", q[0, -200:], mixer.expand(k)[0] if k.shape[2] > 1 else k[0].expand(-1, 4, -1)
        )
        return scores - scores.mean(-1, keepdim=True)

    exact = logits(q, k)
    lost = (logits(*mixer.shared_key(q, k)) - exact).square().sum() / exact.square().sum()
    assert 0.1 < mixer.residual < 0.6
    assert abs(float(lost) - mixer.residual) < 0.05
