"""`rat`: lossless at chunks of one token, its formula written out, chunks that grow, and how far keys are seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from linearize.convert import as_teacher, build_student, export
from linearize.convert.mixers.rat import RAT, RATOptions
from linearize.convert.verify import relative_error
from tests.families import FAMILIES, random_teacher, tiny_tokenizer

EQUAL = 2e-5
LENGTH = 45


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def student_of(family: str = "llama", shake: float = 0.3, layers: int = 2, **options: Any) -> Any:
    student: Any = build_student(random_teacher(family, num_hidden_layers=layers), "rat", **options)
    torch.manual_seed(3)
    with torch.no_grad():
        for mixer in student.mixers:
            for parameter in mixer.new_parameters().values():
                parameter.add_(shake * torch.randn_like(parameter))
    return student


@torch.no_grad()
def logits(student: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return student(input_ids=ids, use_cache=False, **kwargs).logits


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("options", [{"rope": "token"}, {"rope": "chunk"}, {"rank": 0}])
@torch.no_grad()
def test_chunks_of_one_token_are_the_teacher(family: str, options: dict[str, Any]) -> None:
    student = student_of(family, shake=0, chunk=1, window=0, **options)
    with as_teacher(student):
        expected = logits(student, tokens())
    assert relative_error(logits(student, tokens()), expected) < EQUAL
    cache = student.new_cache()
    one_by_one = [student(input_ids=t, past_key_values=cache).logits for t in tokens().split(1, 1)]
    assert relative_error(torch.cat(one_by_one, 1), expected) < EQUAL


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.no_grad()
def test_a_window_over_all_of_the_text_is_the_teacher(family: str) -> None:
    student = student_of(family, shake=0, chunk=4, window=LENGTH)
    with as_teacher(student):
        expected = logits(student, tokens())
    assert relative_error(logits(student, tokens()), expected) < EQUAL


@torch.no_grad()
def expected_heads(mixer: RAT, x: torch.Tensor, rope: Any) -> torch.Tensor:
    """The module's formula, token by token, for one sequence; heads `[T, H, K]`."""
    options, spec = mixer.options, mixer.spec
    chunk, window = options.chunk, options.window
    q, k, v = mixer.project(x)
    turned_q, turned_k = (t[0] for t in mixer.rotate(q, k, rope))
    k, v, gate = k[0], v[0], mixer.chunk_gates.keep(x)[0]
    summaries, heads = [], []
    mean_k = mean_v = torch.zeros_like(k[0])
    for t in range(len(k)):
        g = gate[t]
        if t % chunk == 0:
            mean_k, mean_v = torch.zeros_like(mean_k), torch.zeros_like(mean_v)
            g = torch.zeros_like(g) if options.start == "token" else g
        mean_k = g * mean_k + (1 - g) * (turned_k[t] if options.rope == "token" else k[t])
        mean_v = g * mean_v + (1 - g) * v[t]
        here = tuple(table[:, t : t + 1] for table in rope)
        own_k = (
            mean_k if options.rope == "token" else mixer.rotate(mean_k[None, None], mean_k[None, None], here)[1][0, 0]
        )
        first = max(0, (t - window + 1) // chunk) * chunk if window else (t // chunk) * chunk
        seen = [(kk, vv, True) for kk, vv in summaries[: first // chunk]]
        seen += [(turned_k[j], v[j], False) for j in range(first, t + 1)] if window else [(own_k, mean_v, False)]
        keys, values, far = (torch.stack([torch.as_tensor(s[i]) for s in seen]) for i in range(3))
        keys, values = (s.repeat_interleave(spec.group, 1) for s in (keys, values))
        score = torch.einsum("hk,shk->hs", turned_q[t], keys) * spec.scaling
        score = score + mixer.chunk_gates.summary_weight[:, None] * far
        heads.append(torch.einsum("hs,shk->hk", score.softmax(-1), values))
        if t % chunk == chunk - 1:
            summaries.append((own_k, mean_v))
    return torch.stack(heads) * mixer.chunk_gates.output(x)[0]


@torch.no_grad()
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    chunk=st.sampled_from([1, 2, 4, 16]),
    window=st.integers(0, 20),
    rope=st.sampled_from(["token", "chunk"]),
    start=st.sampled_from(["token", "zero"]),
)
def test_the_formula_written_out(chunk: int, window: int, rope: str, start: str) -> None:
    student = student_of(chunk=chunk, window=window, rope=rope, start=start, layers=1)
    mixer, x = student.mixers[0], torch.randn(1, LENGTH, 64, generator=torch.Generator().manual_seed(5))
    tables = student.get_decoder().rotary_emb(x, torch.arange(LENGTH)[None])
    heads, _ = mixer.mix(x, tables, None, None)
    assert relative_error(heads[0], expected_heads(mixer, x, tables)) < EQUAL


@torch.no_grad()
def test_softcap_and_the_teachers_window_hold_at_longer_chunks() -> None:
    """Gemma 2: nothing farther than its window of 8 changes a token, and logits are capped."""
    student = student_of("gemma2", chunk=2, window=0, layers=1)
    assert student.mixers[0].spec.sliding_window == 8
    ids = tokens(1)
    changed = ids.clone()
    changed[:, 20:22] = (changed[:, 20:22] + 5) % 60 + 2
    difference = (logits(student, ids) - logits(student, changed)).abs().amax(-1)[0]
    # The pair of positions 20 and 21 ends at 21 and is seen up to 21 + 7.
    assert (difference[20:29] > 1e-6).all()
    assert (difference[29:] == 0).all() and (difference[:20] == 0).all()
    student.mixers[0].spec.__dict__["softcap"] = None
    assert relative_error(logits(student, ids), logits(student, changed)) > 1e-3


@torch.no_grad()
def test_chunks_grow_on_a_built_student_and_in_its_configuration(tmp_path: Path) -> None:
    teacher = random_teacher("llama", num_hidden_layers=2)
    teacher.save_pretrained(tmp_path / "teacher")
    tiny_tokenizer(tmp_path / "teacher")
    student: Any = build_student(teacher, "rat", chunk=1, window=0)
    for chunk in (2, 4):
        student.mixers[1].set_chunk(chunk)
        wanted = build_student(teacher, "rat", chunk=chunk, window=0)
        wanted.mixers[0].set_chunk(1)
        wanted.mixers[1].load_state_dict(student.mixers[1].state_dict())
        wanted.mixers[0].load_state_dict(student.mixers[0].state_dict())
        assert torch.equal(logits(student, tokens()), logits(wanted, tokens()))
    assert [layer.options["chunk"] for layer in student.config.plan.layers] == [1, 4]
    again = AutoModelForCausalLM.from_pretrained(export(student, tmp_path / "teacher", tmp_path / "student"))
    assert [mixer.options.chunk for mixer in again.mixers] == [1, 4]
    assert torch.equal(logits(again.eval(), tokens()), logits(student, tokens()))
    with pytest.raises(ValidationError, match="power of two"):
        student.mixers[0].set_chunk(3)


@torch.no_grad()
def test_slots_grow_while_decoding() -> None:
    """More chunks than there is room for at first, prefilled and token by token."""
    student = student_of(chunk=2, window=3, layers=1)
    ids = tokens(2, 70)
    cache = student.new_cache()
    pieces = [student(input_ids=p, past_key_values=cache).logits for p in ids.split([9] + [1] * 61, 1)]
    assert cache.layers[0].state["slots"].shape[1] == 64
    assert relative_error(torch.cat(pieces, 1), logits(student, ids)) < EQUAL


@torch.no_grad()
def test_calibration_sets_gates_and_weighs_the_summaries() -> None:
    teacher = random_teacher("llama", num_hidden_layers=1)
    plain, calibrated = (build_student(teacher, "rat", calibration=c, chunk=4, window=5) for c in (None, tokens(4)))
    with as_teacher(plain):
        expected = logits(plain, tokens(4))
    tensors = calibrated.mixers[0].state_dict()
    changed = {
        n
        for n, tensor in plain.mixers[0].state_dict().items()
        if "down" not in n and not torch.equal(tensor, tensors[n])
    }
    assert changed <= {"chunk_gates.summary_weight", "chunk_gates.keep.projection.up.bias"}
    for head in tensors["chunk_gates.keep.projection.up.bias"].sigmoid().view(2, -1):
        assert min((head - gate).abs().max() for gate in (0.8, 0.9, 0.95)) < 1e-6
    errors = [relative_error(logits(student, tokens(4)), expected) for student in (calibrated, plain)]
    assert errors[0] < errors[1]


def test_a_chunk_must_be_a_power_of_two() -> None:
    with pytest.raises(ValidationError, match="power of two"):
        RATOptions(chunk=12)
