"""Every contract of a student, on a small random model of every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from linearize.convert import as_teacher, build_student, export, verify
from linearize.convert.mixers.base import Mixer
from linearize.convert.verify import relative_error
from tests.families import FAMILIES, random_teacher, tiny_tokenizer

families = pytest.mark.parametrize("family", FAMILIES)
PURE = {"to": "rodimus", "window": 0}
HYBRID = {"to": "rodimus", "window": 8}


def tokens(batch: int = 2, length: int = 40, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False, **kwargs).logits


@families
def test_softmax_as_a_mixer_equals_the_teacher(family: str) -> None:
    teacher = random_teacher(family)
    student = build_student(teacher, "softmax")
    assert relative_error(logits(student, tokens()), logits(teacher, tokens())) < 1e-5


@families
def test_a_window_as_long_as_the_text_equals_the_teacher(family: str) -> None:
    """The projections, positions, softcaps, and head h reading kv head h // group, through our own kernel."""
    teacher = random_teacher(family)
    student = build_student(teacher, "swa", window=40)
    assert relative_error(logits(student, tokens()), logits(teacher, tokens())) < 1e-5
    shorter = build_student(teacher, "swa", window=20)
    if family not in ("mistral", "gemma2"):  # theirs is shorter than 20 or nearly so
        assert relative_error(logits(shorter, tokens()), logits(teacher, tokens())) > 1e-2


def test_heads_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = random_teacher("llama")
    student = build_student(teacher, "softmax")

    def tiled(self: Mixer, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 1, self.spec.group, 1)

    monkeypatch.setattr(Mixer, "expand", tiled)
    assert relative_error(logits(student, tokens()), logits(teacher, tokens())) > 1e-2


@families
@pytest.mark.parametrize("options", [HYBRID, PURE])
def test_the_teacher_is_inside_the_student_without_a_copy(family: str, options: dict) -> None:
    teacher = random_teacher(family)
    student = build_student(teacher, calibration=tokens(4, 48), **options)
    with as_teacher(student):
        assert torch.equal(logits(student, tokens()), logits(teacher, tokens()))
    mine = {p.data_ptr() for p in student.parameters()}
    assert all(p.data_ptr() in mine for p in teacher.parameters())
    assert relative_error(logits(student, tokens()), logits(teacher, tokens())) > 1e-3


@families
@pytest.mark.parametrize("options", [HYBRID, PURE, {**HYBRID, "keep_softmax": "1,3"}])
def test_an_exported_student_passes_its_gate(family: str, options: dict, tmp_path: Path) -> None:
    teacher = random_teacher(family)
    teacher.save_pretrained(tmp_path / "teacher")
    tiny_tokenizer(tmp_path / "teacher")
    student = build_student(teacher, calibration=tokens(4, 48), **options)
    report = verify(export(student, tmp_path / "teacher", tmp_path / "student"))
    assert report.passed, [c for c in report.checks if not c.passed]
    record = json.loads((tmp_path / "student" / "linearize.json").read_text())
    assert not record["dropped"] and set(record["origin"].values()) == {"copied", "created"}


@families
@pytest.mark.parametrize("options", [HYBRID, {**HYBRID, "keep_softmax": "0,2"}])
def test_generation(family: str, options: dict) -> None:
    student = build_student(random_teacher(family), calibration=tokens(4, 48), **options)
    prompt, new = tokens(2, 30), 6
    greedy = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
    expected = prompt
    for _ in range(new):
        expected = torch.cat([expected, logits(student, expected)[:, -1:].argmax(-1)], 1)
    mask = torch.ones_like(prompt)
    assert torch.equal(student.generate(prompt, attention_mask=mask, **greedy), expected)
    static = student.generate(prompt, attention_mask=mask, cache_implementation="static", **greedy)
    assert torch.equal(static, expected)

    # Two rows of different length, padded on the left: each as if alone.
    padded = torch.cat([torch.zeros(2, 9, dtype=torch.long), prompt], 1)
    padded[1] = torch.cat([torch.zeros(15, dtype=torch.long), prompt[1, 6:]])
    alone = student.generate(prompt[1:, 6:], attention_mask=mask[1:, 6:], **greedy)
    both = student.generate(padded, attention_mask=(padded != 0).long(), **greedy)
    assert torch.equal(both[0, -new:], expected[0, -new:]) and torch.equal(both[1, -new:], alone[0, -new:])

    torch.manual_seed(0)
    sampled = student.generate(prompt, attention_mask=mask, do_sample=True, max_new_tokens=new, min_new_tokens=new)
    assert sampled.shape == (2, 30 + new)
    beams = {"num_beams": 3, "do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
    cached = student.generate(prompt, attention_mask=mask, **beams)
    assert torch.equal(cached, student.generate(prompt, attention_mask=mask, use_cache=False, **beams))


@families
@pytest.mark.parametrize("options", [HYBRID, PURE])
def test_packed_sequences_do_not_see_each_other(family: str, options: dict) -> None:
    student = build_student(random_teacher(family), calibration=tokens(4, 48), **options)
    first, second = tokens(1, 21, seed=2), tokens(1, 33, seed=3)
    packed = torch.cat([first, second], 1)
    positions = torch.cat([torch.arange(21), torch.arange(33)])[None]
    bounds = torch.tensor([0, 21, 54])
    together = logits(student, packed, position_ids=positions, cu_seq_lens_q=bounds)
    apart = torch.cat([logits(student, first), logits(student, second)], 1)
    assert relative_error(together, apart) < 1e-5


@families
def test_gradients_reach_every_new_tensor(family: str) -> None:
    student = build_student(random_teacher(family), calibration=tokens(4, 48), **HYBRID)
    for mixer in student.mixers:  # zero starts stop gradients; any other value does not
        for parameter in mixer.new_parameters().values():
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    student.gradient_checkpointing_enable()
    student.train()
    student(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    for mixer in student.mixers:
        dead = [n for n, p in mixer.new_parameters().items() if p.grad is None or not p.grad.abs().sum() > 0]
        assert not dead, dead


def test_unsupported_uses_are_refused_clearly() -> None:
    student = build_student(random_teacher("llama"), **HYBRID)
    with pytest.raises(ValueError, match="continuous batching"):
        student.generate_batch([[1, 2]])
    with pytest.raises(ValueError, match="quantized"):
        student.generate(tokens(1, 5), cache_implementation="quantized", max_new_tokens=1)
    with pytest.raises(ValueError, match="ssist"):
        student.generate(tokens(1, 5), assistant_model=random_teacher("llama"), max_new_tokens=2)
    from transformers import DynamicCache

    with pytest.raises(TypeError, match="new_cache"):
        student(tokens(1, 5), past_key_values=DynamicCache(config=random_teacher("llama").config), use_cache=True)
