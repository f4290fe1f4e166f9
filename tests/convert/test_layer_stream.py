"""A streamed decoder computes what the whole one does, and holds one block at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from linearize.convert import build_student
from linearize.convert.errors import ConversionError
from linearize.convert.export import export
from linearize.convert.layer_stream import LayerStream
from tests.families import FAMILIES, random_teacher, tiny_tokenizer

IDS = torch.randint(2, 64, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_teacher_and_student_equal_the_whole_ones(family: str, tmp_path: Path) -> None:
    teacher = random_teacher(family)
    teacher.save_pretrained(tmp_path / "teacher")
    tiny_tokenizer(tmp_path / "teacher")
    student = build_student(teacher, "rodimus", keep_softmax="2", window=8)
    export(student, tmp_path / "teacher", tmp_path / "student")
    for model, folder in ((teacher, "teacher"), (student, "student")):
        with torch.no_grad():
            whole = model(input_ids=IDS, use_cache=False).logits
        stream = LayerStream(tmp_path / folder, torch.float32)
        torch.testing.assert_close(stream.forward(IDS), whole, rtol=1e-5, atol=1e-5)
        assert all(p.is_meta for p in stream.model.parameters())
        with stream.block(1):
            held = [name for name, p in stream.model.named_parameters() if not p.is_meta]
            assert held and all(name.startswith(stream.block_names[1] + ".") for name in held)


def test_a_tensor_under_another_name_or_not_finite_is_an_error(tmp_path: Path) -> None:
    teacher = random_teacher("llama")
    teacher.save_pretrained(tmp_path)
    stream = LayerStream(tmp_path, torch.float32)
    del stream.files["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConversionError, match=r"no tensor model\.layers\.1\.mlp"), stream.block(1):
        pass
    with torch.no_grad():
        teacher.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    teacher.save_pretrained(tmp_path)
    stream = LayerStream(tmp_path, torch.float32)
    with pytest.raises(ConversionError, match=r"layers\.0\.mlp\.up_proj\.weight holds NaN"), stream.block(0):
        pass
