"""Every contract of a mixer, for each that is registered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from linearize.convert import as_teacher, build_student, export
from linearize.convert.cache import MixerCacheLayer
from linearize.convert.mixers import MIXERS
from linearize.convert.verify import relative_error
from tests.families import FAMILIES, random_teacher, tiny_tokenizer

EQUAL = 2e-5
LAYERS = 2

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "linear": [{"feature_map": name} for name in ("relu", "elu", "identity")],
    "lolcats": [{"shift": "none"}],
    "mamba2": [{"rope": True, "conv": 0, "D": False}],
    "liger": [{"mix": "learned"}],
    "gla": [{"rope": True}],
    "gated-deltanet": [{"rope": True, "conv": 0}],
    "mlstm": [{"rope": True}],
    "gsa": [{"rope": True, "slots": 8}],
    "inner-function": [{"mask": False}],
    "rodimus": [{"silu": False, "rope": True}],
    "rodimus++": [{"two_hop": False, "rope": True}],
    "rat": [{"chunk": 4}, {"chunk": 2, "window": 0, "rope": "chunk"}, {"chunk": 4, "start": "zero", "rank": 0}],
    "head-hybrid": [
        {"softmax_heads": [1], "mixer": "gla", "options": {"window": 6}},
        {"softmax_heads": 0.5, "mixer": "rodimus", "options": {"window": 6}},
    ],
}
"""Options besides the defaults that change what a mixer computes."""


def _cases() -> list[Any]:
    cases = []
    for name, mixer in sorted(MIXERS.items()):
        windows: list[dict[str, Any]] = [{}]
        if "window" in mixer.Options.model_fields:
            windows = [{"window": 6}]
            try:
                mixer.Options(window=0)
                windows.append({"window": 0})
            except ValueError:
                pass
        for options in [*windows, *({**windows[0], **variant} for variant in VARIANTS.get(name, []))]:
            label = ",".join(f"{key}={value}" for key, value in options.items())
            cases.append(pytest.param(name, options, id=f"{name}[{label}]"))
    return cases


CASES = _cases()
mixers = pytest.mark.parametrize(("name", "options"), CASES)
in_every_family = pytest.mark.parametrize(
    ("name", "options", "family"),
    [
        pytest.param(*case.values, family, id=f"{family}-{case.id}")
        for case in CASES
        for family in FAMILIES
        if (case.values[0], family) != ("rodimus++", "gemma2")  # refused: four norms in a block
    ],
)


def tokens(batch: int = 2, length: int = 27, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def student_of(name: str, options: dict[str, Any], family: str = "llama", **changes: Any) -> Any:
    """A calibrated student whose new tensors are shaken, so that no zero start hides anything."""
    teacher = random_teacher(family, num_hidden_layers=LAYERS, **changes)
    student: Any = build_student(teacher, name, calibration=tokens(2, 32), **options)
    torch.manual_seed(3)
    with torch.no_grad():
        for mixer in student.mixers:
            for parameter in mixer.new_parameters().values():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return student


@torch.no_grad()
def logits(student: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return student(input_ids=ids, use_cache=False, **kwargs).logits


@torch.no_grad()
def in_pieces(student: Any, ids: torch.Tensor, sizes: list[int], cache: Any = None) -> torch.Tensor:
    cache = cache or student.new_cache()
    pieces = ids.split(sizes, 1)
    return torch.cat([student(input_ids=p, past_key_values=cache, use_cache=True).logits for p in pieces], 1)


@in_every_family
def test_every_way_to_read_a_text_gives_the_same(name: str, options: dict[str, Any], family: str) -> None:
    """Token by token, in pieces, padded on the left, and packed with another text: all as in one."""
    student, ids = student_of(name, options, family), tokens()
    whole, length = logits(student, ids), ids.shape[1]
    assert relative_error(in_pieces(student, ids, [1] * length), whole) < EQUAL
    assert relative_error(in_pieces(student, ids, [11, 1, length - 12]), whole) < EQUAL

    padded = torch.cat([torch.zeros(2, 9, dtype=torch.long), ids], 1)
    mask = (padded != 0).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    both = logits(student, padded, attention_mask=mask, position_ids=positions)[:, 9:]
    assert relative_error(both, whole) < EQUAL

    if MIXERS[name].recurrent:
        packed = torch.cat([ids[:1], ids[1:, :14]], 1)
        positions = torch.cat([torch.arange(length), torch.arange(14)])[None]
        bounds = torch.tensor([0, length, length + 14])
        together = logits(student, packed, position_ids=positions, cu_seq_lens_q=bounds)
        assert relative_error(together, torch.cat([whole[:1], whole[1:, :14]], 1)) < EQUAL


@mixers
@torch.no_grad()
def test_a_padded_prompt_is_continued_as_if_alone(name: str, options: dict[str, Any]) -> None:
    """Rows of different length: the padding is read with the prompt in two pieces, the rest token by token."""
    student, ids, pad = student_of(name, options), tokens(2, 24), 9
    ids[0, :pad] = 0
    mask = (ids != 0).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache, pieces, start = student.new_cache(), [], 0
    for size in (5, 11, *[1] * 8):
        end = start + size
        inputs = {"input_ids": ids[:, start:end], "position_ids": positions[:, start:end]}
        output = student(**inputs, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        pieces.append(output.logits)
        start = end
    both = torch.cat(pieces, 1)
    assert relative_error(both[:1, pad:], logits(student, ids[:1, pad:])) < EQUAL
    assert relative_error(both[1:], logits(student, ids[1:])) < EQUAL


@mixers
def test_padded_prompts_generate_as_if_alone(name: str, options: dict[str, Any]) -> None:
    student, prompt = student_of(name, options), tokens(2, 15)
    prompt[0, :9] = 0
    greedy = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
    both = student.generate(prompt, attention_mask=(prompt != 0).long(), **greedy)
    short = prompt[:1, 9:]
    alone = student.generate(short, attention_mask=torch.ones_like(short), **greedy)
    assert torch.equal(both[0, -4:], alone[0, -4:])


@mixers
def test_a_reordered_cache_goes_on_from_the_chosen_rows(name: str, options: dict[str, Any]) -> None:
    student, ids = student_of(name, options), tokens(3)
    cache = student.new_cache()
    in_pieces(student, ids[:, :20], [20], cache)
    order = torch.tensor([2, 2, 0])
    cache.reorder_cache(order)
    rest = in_pieces(student, ids[:, 20:], [1] * 7, cache)
    expected = logits(student, torch.cat([ids[order, :20], ids[:, 20:]], 1))[:, 20:]
    assert relative_error(rest, expected) < EQUAL


@mixers
def test_the_cache_holds_as_many_bytes_as_the_mixer_says(name: str, options: dict[str, Any]) -> None:
    student = student_of(name, options).bfloat16()
    for mixer in student.mixers:
        for module in mixer.float32_modules:
            mixer.get_submodule(module).float()
    context = 20
    cache = student.new_cache()
    in_pieces(student, tokens(2, context), [context - 1, 1], cache)
    for mixer, layer in zip(student.mixers, cache.layers, strict=True):
        held = layer.state.values() if isinstance(layer, MixerCacheLayer) else (layer.keys, layer.values)
        assert sum(t.untyped_storage().nbytes() for t in held) // 2 == mixer.state_bytes(context, torch.bfloat16)


@mixers
def test_a_reloaded_student_is_the_same_to_the_bit(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    teacher = random_teacher("llama", num_hidden_layers=LAYERS)
    teacher.save_pretrained(tmp_path / "teacher")
    tiny_tokenizer(tmp_path / "teacher")
    student = student_of(name, options)
    again = AutoModelForCausalLM.from_pretrained(export(student, tmp_path / "teacher", tmp_path / "student"))
    assert torch.equal(logits(again.eval(), tokens()), logits(student, tokens()))
    written = [layer["options"] for layer in again.config.linearize["layers"]]
    assert written == [mixer.options.every() for mixer in student.mixers]  # so that defaults may change

    half = AutoModelForCausalLM.from_pretrained(tmp_path / "student", dtype=torch.bfloat16).eval()
    for mixer in half.mixers:
        for module in mixer.float32_modules:
            assert {p.dtype for p in mixer.get_submodule(module).parameters()} <= {torch.float32}
    in_bfloat16 = logits(half, tokens())
    assert in_bfloat16.dtype == torch.bfloat16 and torch.isfinite(in_bfloat16).all()


@pytest.mark.parametrize("to", ["rodimus", "head-hybrid"])
def test_an_older_student_computes_what_it_did(to: str, tmp_path: Path) -> None:
    """Format 1 names given options alone, and q and k of `rodimus` had no SiLU then."""
    teacher = random_teacher("llama", num_hidden_layers=LAYERS)
    teacher.save_pretrained(tmp_path / "teacher")
    tiny_tokenizer(tmp_path / "teacher")
    without: dict[str, Any] = {"silu": False} if to == "rodimus" else {"options": {"silu": False}}
    student = student_of(to, without)
    file = export(student, tmp_path / "teacher", tmp_path / "student") / "config.json"
    config = json.loads(file.read_text())
    config["linearize"] |= {"version": 1, "layers": [{"mixer": to, "options": {}}] * LAYERS}
    file.write_text(json.dumps(config))
    again = AutoModelForCausalLM.from_pretrained(file.parent).eval()
    assert torch.equal(logits(again, tokens()), logits(student, tokens()))


@in_every_family
def test_gradients_reach_every_new_tensor(name: str, options: dict[str, Any], family: str) -> None:
    student = student_of(name, options, family).train()
    student(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    for mixer in student.mixers:
        new = mixer.new_parameters()
        dead = {n for n, p in new.items() if p.grad is None or not p.grad.abs().sum() > 0}
        infinite = [n for n, p in new.items() if p.grad is not None and not p.grad.isfinite().all()]
        assert not dead and not infinite, f"no gradient: {dead}; not finite: {infinite}"


@mixers
@pytest.mark.parametrize(("length", "scale"), [(4096, 1.0), (256, 30.0)])
def test_long_and_large_inputs_stay_finite(name: str, options: dict[str, Any], length: int, scale: float) -> None:
    student = student_of(name, options, max_position_embeddings=4096)
    mixer, x = student.mixers[0], (scale * _noise(length)).requires_grad_()
    if MIXERS[name].recurrent:
        heads, _ = mixer.mix(x, student.get_decoder().rotary_emb(x, torch.arange(length)[None]), None, None)
        heads.square().mean().backward()
        assert torch.isfinite(heads).all() and x.grad is not None and torch.isfinite(x.grad).all()


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(name for name, mixer in MIXERS.items() if mixer.recurrent))
def test_32768_tokens_stay_finite(name: str) -> None:
    student, x = student_of(name, {}), _noise(32768)
    heads, state = student.mixers[0].mix(x, student.get_decoder().rotary_emb(x, torch.arange(32768)[None]), None, None)
    assert torch.isfinite(heads).all()
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def _noise(length: int) -> torch.Tensor:
    return torch.randn(1, length, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_options_and_mixers_say_what_they_are(name: str) -> None:
    mixer = MIXERS[name]
    assert mixer.name == name and mixer.__doc__
    undocumented = [option for option, field in mixer.Options.model_fields.items() if not field.description]
    assert not undocumented


# ---------------------------------------------------------------------- formulas, written out over all pairs of tokens


def _layer(name: str, **options: Any) -> tuple[Any, torch.Tensor, Any, list[torch.Tensor]]:
    """A mixer, an input, RoPE, and the teacher's q, k (with RoPE, expanded) and v there."""
    student = student_of(name, options)
    mixer, x = student.mixers[0], torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(5))
    rope = student.get_decoder().rotary_emb(x, torch.arange(20)[None])
    q, k, v = mixer.project(x)
    q, k = mixer.rotate(q, k, rope)
    return mixer, x, rope, [q, mixer.expand(k), mixer.expand(v)]


def _pairs(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bthk,bshk->bhts", q, k)


DISTANCE = torch.arange(20)[:, None] - torch.arange(20)


@torch.no_grad()
@pytest.mark.parametrize("shift", ["window", "none"])
def test_lolcats_is_one_normaliser_over_window_and_rest(shift: str) -> None:
    mixer, x, rope, (q, k, v) = _layer("lolcats", window=6, shift=shift)
    rest = mixer.linear_rest
    inside = (DISTANCE >= 0) & (DISTANCE < 6)
    logits = (_pairs(q, k) * mixer.spec.scaling).masked_fill(~inside, -torch.inf)
    if shift == "window":
        logits = logits - logits.logsumexp(-1, keepdim=True)
    linear = _pairs(rest.q_map(q), rest.k_map(k)) * (DISTANCE >= 6) * rest.log_weight.exp()[:, None, None]
    weights = logits.exp() + linear
    expected = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v)
    assert relative_error(mixer.mix(x, rope, None, None)[0], expected) < EQUAL


@torch.no_grad()
def test_lolcats_with_a_window_over_all_of_the_text_equals_the_teacher() -> None:
    student = student_of("lolcats", {"window": 27})
    with as_teacher(student):
        expected = logits(student, tokens())
    assert relative_error(logits(student, tokens()), expected) < EQUAL


@torch.no_grad()
@pytest.mark.parametrize("feature_map", ["hedgehog", "relu", "elu"])
def test_linear_divides_by_its_own_weights(feature_map: str) -> None:
    mixer, x, rope, (q, k, v) = _layer("linear", window=0, feature_map=feature_map)
    weights = _pairs(mixer.recurrence.q_map(q), mixer.recurrence.k_map(k)) * (DISTANCE >= 0)
    expected = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True).clamp_min(1e-6), v)
    assert relative_error(mixer.mix(x, rope, None, None)[0], mixer.branch.scale * expected) < EQUAL


@torch.no_grad()
def test_retnet_weighs_by_distance() -> None:
    mixer, x, rope, (_, _, v) = _layer("retnet", window=0)
    q, k = (torch.nn.functional.silu(t) for t in mixer.project(x)[:2])
    q, k = mixer.rotate(q, mixer.expand(k), rope)
    decay = (-mixer.recurrence.decay.log_rate.exp())[:, None, None] * DISTANCE.clamp_min(0)
    weights = _pairs(q, k) * decay.exp() * (DISTANCE >= 0) * mixer.spec.head_dim**-0.5
    o = torch.einsum("bhts,bshv->bthv", weights, v)
    norm = mixer.recurrence.norm
    normed = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight
    expected = mixer.branch.scale * normed * torch.nn.functional.silu(norm.gate(x))
    assert relative_error(mixer.mix(x, rope, None, None)[0], expected) < EQUAL


@torch.no_grad()
def test_mamba2_weighs_by_silu_and_steps() -> None:
    mixer, x, rope, (_, _, v) = _layer("mamba2", window=0, rope=True, conv=0, D=False)
    q, k = (torch.nn.functional.silu(t) for t in mixer.project(x)[:2])
    q, k = mixer.rotate(q, mixer.expand(k), rope)
    recurrence, norm = mixer.recurrence, mixer.recurrence.norm
    step = torch.nn.functional.softplus(recurrence.step(x)).mT
    fallen = (-recurrence.A_log.exp()[:, None] * step).cumsum(-1)
    decay = (fallen[..., :, None] - fallen[..., None, :]).masked_fill(DISTANCE < 0, -torch.inf).exp()
    weights = _pairs(q, k) * decay * step[..., None, :] * mixer.spec.head_dim**-0.5
    gated = torch.einsum("bhts,bshv->bthv", weights, v) * torch.nn.functional.silu(norm.gate(x))
    expected = mixer.branch.scale * gated * (gated.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight
    assert relative_error(mixer.mix(x, rope, None, None)[0], expected) < EQUAL


def test_rwkv6_forgets_at_once_without_a_gradient_of_nothing() -> None:
    """Channels whose exp(w) is beyond float32 keep nothing and learn nothing; the others do not notice."""
    mixer, x, rope, _ = _layer("rwkv6", window=0)
    decay, real = mixer.recurrence.decay.up, torch.ones(x.shape[:2], dtype=torch.bool)
    real[:, :3] = False
    outputs, gradients = [], []
    for bias in (10.0, 1000.0):
        with torch.no_grad():
            decay.bias[::2] = bias
        heads, _ = mixer.mix(x, rope, real, None)
        outputs.append(heads[real])
        gradients.append(torch.autograd.grad(heads[real].square().sum(), [decay.bias, decay.weight]))
    assert torch.equal(*outputs) and outputs[0].isfinite().all()
    for ours, expected in zip(*gradients, strict=True):
        assert torch.equal(ours, expected) and (ours[::2] == 0).all() and (ours[1::2] != 0).any()


def test_lrpe_turns_by_the_distance() -> None:
    """`Σ_i q_i k_i cos((t-s) θ_i)`, θ of the second half of the channels being 0."""
    from linearize.convert.mixers.cosformer2 import lrpe

    q, k = torch.randn(2, 1, 20, 3, 16, generator=torch.Generator().manual_seed(0))
    position = torch.arange(20)[None]
    theta = torch.cat([10000.0 ** (-2 * torch.arange(8) / 16), torch.zeros(8)])
    expected = torch.einsum("bthk,bshk,tsk->bhts", q, k, (DISTANCE[..., None] * theta).cos())
    assert relative_error(_pairs(lrpe(q, position), lrpe(k, position)), expected) < EQUAL
