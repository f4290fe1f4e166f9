"""`inner-function`: it starts as the teacher, and computes its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from linearize.convert import as_teacher, build_student
from linearize.convert.mixers.inner_function import InnerFunctionOptions
from linearize.convert.verify import relative_error
from tests.families import FAMILIES, random_teacher

EQUAL = 2e-5


def student_of(family: str, shake: float = 0.0, **options: Any) -> Any:
    student: Any = build_student(random_teacher(family, num_hidden_layers=2), "inner-function", **options)
    torch.manual_seed(3)
    with torch.no_grad():
        for mixer in student.mixers:
            for parameter in mixer.new_parameters().values():
                parameter.add_(shake * torch.randn_like(parameter))
    return student


def tokens() -> torch.Tensor:
    return torch.randint(2, 64, (2, 30), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_start_is_the_teacher_whole_and_token_by_token(family: str) -> None:
    student = student_of(family)
    with as_teacher(student):
        expected = student(input_ids=tokens(), use_cache=False).logits
    assert relative_error(student(input_ids=tokens(), use_cache=False).logits, expected) < EQUAL
    cache = student.new_cache()
    pieces = [student(input_ids=t, past_key_values=cache).logits for t in tokens().split([20] + [1] * 10, 1)]
    assert relative_error(torch.cat(pieces, 1), expected) < EQUAL


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_formula_written_out(family: str) -> None:
    """Over all pairs of tokens; `mix` and the family's own attention functions agree."""
    student = student_of(family, shake=0.2, experts=6, top_k=3)
    mixer = student.mixers[0]
    spec, functions, mask = mixer.spec, mixer.inner_functions, mixer.dynamic_mask
    x = torch.randn(1, 30, 64, generator=torch.Generator().manual_seed(5))
    rope = student.get_decoder().rotary_emb(x, torch.arange(30)[None])
    q, k, v = mixer.project(x)
    q, k = mixer.rotate(q, k, rope)
    score = functions.query(x) @ functions.keys.T
    score = score.masked_fill(score < score.topk(3).values[..., -1:], -torch.inf)
    v = v * (1 + score.softmax(-1) @ functions.experts).view(v.shape)
    bias = torch.exp(mask.strength * F.softplus(mask.step(v.flatten(2))))
    logits = torch.einsum("bthk,bshk->bhts", q, mixer.expand(k)) * spec.scaling + bias.mT[:, :, None]
    if spec.softcap:  # the 1 matters inside a cap
        logits = spec.softcap * torch.tanh((logits - 1) / spec.softcap)
    distance = torch.arange(30)[:, None] - torch.arange(30)
    logits = logits.masked_fill((distance < 0) | (distance >= (spec.sliding_window or 30)), -torch.inf)
    expected = torch.einsum("bhts,bshv->bthv", logits.softmax(-1), mixer.expand(v))
    assert relative_error(mixer.mix(x, rope, None, None)[0], expected) < EQUAL
    hidden = torch.zeros(1, 1, 30, 30).masked_fill((distance < 0) | (distance >= (spec.sliding_window or 30)), -1e9)
    output, _ = mixer(x, position_embeddings=rope, attention_mask=hidden)
    assert relative_error(output, mixer.output(expected)) < EQUAL


def test_the_first_step_teaches_the_functions_and_the_second_everything() -> None:
    student = student_of("llama")
    new = {f"{m.layer_idx}.{n}": p for m in student.mixers for n, p in m.new_parameters().items()}
    optimizer = torch.optim.SGD(new.values(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        student(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
        optimizer.step()
    assert not [name for name, p in new.items() if not p.grad.abs().sum() > 0]


def test_more_functions_than_there_are_are_refused() -> None:
    with pytest.raises(ValidationError, match="more than the 3 experts"):
        InnerFunctionOptions(experts=3, top_k=4)
