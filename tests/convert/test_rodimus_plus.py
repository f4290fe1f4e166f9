"""`rodimus++`: the two-hop block written out, and where it may stand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from linearize.convert import as_teacher, build_student
from linearize.convert.calibration import routed
from linearize.convert.errors import ConversionError
from linearize.convert.plan import make_plan
from linearize.convert.verify import relative_error
from tests.families import random_teacher

EQUAL = 2e-5


def tokens(batch: int = 2, length: int = 27) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def student_of(family: str = "llama", layers: int = 2, **options: Any) -> Any:
    teacher = random_teacher(family, num_hidden_layers=layers)
    student: Any = build_student(teacher, "rodimus++", **{"window": 6, **options})
    torch.manual_seed(3)
    with torch.no_grad():
        for mixer in student.mixers:
            for parameter in mixer.new_parameters().values():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return student


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
@pytest.mark.parametrize("two_hop", [True, False])
def test_the_block_written_out(family: str, two_hop: bool) -> None:
    """X_s = X + Rodimus(Norm X), Ŷ = X_s + SWSKA(Norm X_s), Y = FFN(Norm Ŷ) + X_s, over all pairs of tokens."""
    student = student_of(family, two_hop=two_hop)
    block = student.get_decoder().layers[0]
    mixer, spec = block.self_attn, block.self_attn.spec
    x = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(5))
    rope = student.get_decoder().rotary_emb(x, torch.arange(20)[None])
    output = block(x, position_embeddings=rope)
    output = output[0] if isinstance(output, tuple) else output

    h = block.input_layernorm(x)
    q, k, v = mixer.project(h)
    y, _ = mixer.recurrence(mixer.tokens(h, q, k, v, rope, None, None), None)
    middle = x + mixer.output(mixer.branch.scale * y)
    q, k, v = mixer.project(mixer.hop_norm(middle))
    q, k = mixer.rotate(*mixer.shared_key(q, k), rope)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    weights = torch.einsum("bthk,bsk->bhts", q, k[:, :, 0]) * spec.scaling
    weights = weights.masked_fill((distance < 0) | (distance >= 6), -torch.inf).softmax(-1)
    heads = torch.einsum("bhts,bshv->bthv", weights, mixer.expand(v))
    both = middle + mixer.output(mixer.branch.window_scale * heads)
    expected = block.mlp(block.post_attention_layernorm(both)) + (middle if two_hop else both)
    assert relative_error(output, expected) < EQUAL


@torch.no_grad()
def test_the_teacher_is_exact_and_a_look_at_the_student_changes_nothing() -> None:
    teacher, student = random_teacher("llama", num_hidden_layers=2), student_of()
    expected = teacher(input_ids=tokens()).logits
    student(input_ids=tokens())
    with as_teacher(student):
        assert torch.equal(student(input_ids=tokens(), use_cache=False).logits, expected)

    def look(mixer: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        mixer.attend(hidden_states, **{**kwargs, "past_key_values": None})
        return mixer.attention(hidden_states, **{**kwargs, "past_key_values": None})[0], None

    with routed(student.mixers, look):
        assert torch.equal(student(input_ids=tokens(), use_cache=False).logits, expected)
    with routed(student.mixers, lambda mixer, x, **kwargs: mixer.attend(x, **kwargs)):
        routed_logits = student(input_ids=tokens(), use_cache=False).logits
    assert torch.equal(routed_logits, student(input_ids=tokens(), use_cache=False).logits)


def test_gradient_checkpointing_and_copies_keep_the_second_hop() -> None:
    student = student_of().train()
    plain = student(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    plain.backward()
    other = copy.deepcopy(student)
    other.zero_grad()
    other.gradient_checkpointing_enable()
    loss = other(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    loss.backward()
    assert torch.equal(loss, plain)
    for (name, p), (_, other_p) in zip(student.named_parameters(), other.named_parameters(), strict=True):
        assert (p.grad is None) == (other_p.grad is None), name
        assert p.grad is None or relative_error(other_p.grad, p.grad) < EQUAL, name
    assert all(mixer.stream is None and mixer.second_hop is None for mixer in other.mixers)


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_other_blocks_are_refused(family: str) -> None:
    with pytest.raises(ConversionError, match="Take rodimus instead"):
        build_student(random_teacher(family, num_hidden_layers=1) if family == "gemma2" else _olmo2(), "rodimus++")


def _olmo2() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.families import BASE

    return AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo2", **{**BASE, "num_hidden_layers": 1}))


@torch.no_grad()
def test_calibration_brings_every_layer_nearer_to_the_teacher() -> None:
    teacher, errors = random_teacher("llama", num_hidden_layers=2), []

    def look(mixer: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        kwargs["past_key_values"] = None
        output, mine = mixer.attention(hidden_states, **kwargs)[0], mixer.attend(hidden_states, **kwargs)[0]
        errors.append(relative_error(mine, output))
        return output, None

    for calibration in (None, tokens(8, 64)):
        student: Any = build_student(teacher, "rodimus++", calibration=calibration, window=6)
        with routed(student.mixers, look):
            student(input_ids=tokens(4, 50), use_cache=False)
    assert errors[2] < 0.95 * errors[0] and errors[3] < 0.95 * errors[1]


@torch.no_grad()
def test_a_channel_mixer_in_the_same_block_keeps_the_second_hop() -> None:
    teacher = random_teacher("llama", num_hidden_layers=1)
    plans = [make_plan(1, "rodimus++", ffn=ffn, window=6) for ffn in (None, "cdmoe")]
    alone, both = (build_student(teacher, plan).model.layers[0] for plan in plans)
    both.self_attn.load_state_dict(alone.self_attn.state_dict())
    x = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(5))
    rope = teacher.model.rotary_emb(x, torch.arange(20)[None])
    assert torch.equal(both(x, position_embeddings=rope), alone(x, position_embeddings=rope))
