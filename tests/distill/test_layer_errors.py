"""The error of every layer: against the teacher inside a student, and against one that stands beside it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from linearize.convert import build_student, export
from linearize.convert.layer_stream import LayerStream
from linearize.convert.surgery_error import surgery_error
from linearize.distill.layer_errors import layer_errors, layer_errors_streamed
from linearize.distill.reference import Reference
from tests.families import FAMILIES, random_teacher

IDS = torch.randint(2, 64, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("to", ["swa", "rodimus++"])
def test_it_is_the_surgerys_error_while_the_student_holds_its_teacher(to: str) -> None:
    teacher = random_teacher("llama")
    student = build_student(teacher, to, window=3, keep_softmax="2", calibration=IDS)
    reference = Reference(student, teacher)
    assert reference.zero_copy
    errors = layer_errors(reference, IDS)
    expected = surgery_error(student, IDS).layers
    assert errors[2] is None and len(errors) == 4
    assert [errors[i] for i in (0, 1, 3)] == pytest.approx([expected[i] for i in (0, 1, 3)], rel=1e-5)
    assert min(error for error in errors if error is not None) > 0.01


@torch.no_grad()
def test_a_teacher_beside_a_student_that_has_moved_is_still_the_measure() -> None:
    """Other layers of the student do not count; the mixer's own projections do."""
    teacher = random_teacher("llama")
    student = build_student(copy.deepcopy(teacher), "swa", window=3)
    before = layer_errors(Reference(student, teacher), IDS)
    student.model.layers[0].mlp.down_proj.weight.mul_(3)
    student.model.embed_tokens.weight.mul_(2)
    assert not Reference(student, teacher).zero_copy
    assert layer_errors(Reference(student, teacher), IDS) == pytest.approx(before, rel=1e-6)
    student.model.layers[1].self_attn.o_proj.weight.zero_()
    after = layer_errors(Reference(student, teacher), IDS)
    assert after[1] == pytest.approx(1, rel=1e-6) and after[0] == before[0] and after[2:] == before[2:]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_softmax_layers_of_a_plan_have_none(family: str) -> None:
    teacher = random_teacher(family)
    student = build_student(teacher, "softmax:0-1,swa:2-3", window=3)
    errors = layer_errors(Reference(student, teacher), IDS)
    assert max(errors[:2]) < 1e-5 and min(errors[2:]) > 0.01


@pytest.mark.parametrize(("family", "to"), [("llama", "swa"), ("gemma2", "swa"), ("llama", "rodimus++")])
def test_block_by_block_it_is_the_same(family: str, to: str, tmp_path: Path) -> None:
    teacher = random_teacher(family)
    teacher.save_pretrained(tmp_path / "teacher")
    student = build_student(copy.deepcopy(teacher), to, window=3, keep_softmax="2")
    with torch.no_grad():
        student.model.layers[1].self_attn.o_proj.weight.mul_(2)
    export(student, tmp_path / "teacher", tmp_path / "student")
    expected = layer_errors(Reference(student, teacher), IDS)
    streams = [LayerStream(tmp_path / name, torch.float32) for name in ("teacher", "student")]
    streamed = layer_errors_streamed(*streams, IDS)
    assert expected.pop(2) is None and streamed.pop(2) is None
    assert streamed == pytest.approx(expected, rel=1e-5) and expected[1] > 1


def test_the_student_trains_on_as_it_did() -> None:
    teacher = random_teacher("llama")
    student = build_student(teacher, "swa", window=3).train()
    layer_errors(Reference(student, teacher), IDS)
    assert student.training and not any(p.grad is not None for p in student.parameters())
