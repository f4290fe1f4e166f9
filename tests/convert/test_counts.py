"""Counts against what torch counts, against shapes by hand, and the published closed forms against their parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from linearize.convert import build_student, make_plan
from linearize.convert.attention_spec import mean_keys
from linearize.convert.counts import count
from linearize.convert.mixers import MIXERS
from linearize.convert.scaling_table import ARCHITECTURES, operations
from tests.families import FAMILIES, random_teacher

LENGTH = 32


def config(hidden: int = 96, heads: int = 4, layers: int = 2, **changes: Any) -> LlamaConfig:
    sizes = dict(hidden_size=hidden, intermediate_size=8 * hidden // 3, num_attention_heads=heads)
    return LlamaConfig(vocab_size=64, num_hidden_layers=layers, **{**sizes, **changes})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_teacher_costs_what_torch_counts(family: str) -> None:
    """torch counts all pairs of tokens; the difference is the pairs that attention does not see."""
    teacher = random_teacher(family, num_hidden_layers=2)
    teacher.set_attn_implementation("eager")  # torch has no count of its fused attention on the CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        teacher(input_ids=torch.ones(1, LENGTH, dtype=torch.long), use_cache=False)
    spec = build_student(teacher, "softmax").mixers[0].spec
    unseen = sum(
        4 * spec.num_heads * spec.head_dim * (LENGTH - mean_keys(LENGTH, mixer.spec.sliding_window))
        for mixer in build_student(teacher, "softmax").mixers
    )
    counts = count(teacher, context=LENGTH)
    assert counts.parameters == sum(p.numel() for p in teacher.parameters())
    assert counts.flops_per_token + unseen == pytest.approx(counter.get_total_flops() / LENGTH)


@given(st.integers(1, 40), st.integers(1, 50))
def test_mean_keys_is_the_mean(context: int, window: int) -> None:
    assert mean_keys(context, window) == pytest.approx(sum(min(t, window) for t in range(1, context + 1)) / context)
    assert mean_keys(context, None) == (context + 1) / 2


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_every_mixer_can_be_counted(name: str) -> None:
    """From the configuration alone, without tensors; the new ones as the student has them."""
    family = config(num_key_value_heads=2)
    near, far = (count(family, make_plan(2, name), context) for context in (64, 4096))
    teacher = count(family, context=4096)
    assert near.parameters == far.parameters == teacher.parameters + near.new_parameters
    assert 0 < near.flops_per_token <= far.flops_per_token
    assert teacher.kv_bytes == far.kv_bytes and far.training_flops_per_token == 3 * far.flops_per_token
    if MIXERS[name].recurrent and name not in ("head-hybrid", "rat"):
        assert far.flops_per_token < teacher.flops_per_token
        assert far.flops_per_token == pytest.approx(count(family, make_plan(2, name), 8192).flops_per_token, rel=0.02)


def test_softmax_as_a_mixer_or_kept_or_in_a_hybrid_costs_the_same() -> None:
    family = config()
    expected = count(family, context=100).flops_per_token
    for to, options in (
        ("softmax", {}),
        ("keep", {}),
        ("head-hybrid", {"softmax_heads": 1.0}),
        ("swa", {"window": 100}),
    ):
        assert count(family, make_plan(2, to, **options), 100).flops_per_token == pytest.approx(expected)


def test_a_recurrence_costs_its_matrices_its_window_and_its_state() -> None:
    family = config()
    student = build_student(AutoModelForCausalLM.from_config(family), "gla", window=5)
    mixer = student.mixers[0]
    matrices = sum(p.numel() for p in mixer.parameters() if p.dim() > 1)
    window = 4 * 96 * (5 * 64 - 10) / 64
    assert mixer.flops(64) == pytest.approx(2 * matrices + window + 4 * 4 * 24 * 24)


def test_experts_that_are_not_found_cost_nothing() -> None:
    family, options = config(), {"heads": 2, "top_k": 3, "key_dim": 8}
    small, large = (
        count(family, make_plan(2, "keep", ffn="cdmoe", ffn_options={**options, "experts": n})) for n in (16, 64)
    )
    keys = 2 * 2 * (8 - 4) * 8  # heads, halves, further rows, their width
    assert large.new_parameters - small.new_parameters == 2 * (keys + 2 * 48 * 96)
    assert large.flops_per_token - small.flops_per_token == pytest.approx(2 * 2 * keys)


# ---------------------------------------------------------------------- the published closed forms

sizes = st.tuples(st.integers(1, 5), st.integers(1, 4096), st.integers(1, 50), st.integers(1, 40), st.integers(1, 16))


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@given(sizes)
def test_the_closed_forms_are_the_sums_of_their_operations(name: str, size: tuple[int, ...]) -> None:
    b, n, l, width, h = size
    d = width * h
    parts = operations(name, n, d, h)
    parameters = sum(p.parameters * (1 if p.once else l) for p in parts)
    forward = sum(p.flops for p in parts)
    assert parameters == ARCHITECTURES[name].parameters(l, d, h)
    assert 3 * b * n * l * forward == ARCHITECTURES[name].flops(b, n, l, d, h)


def test_llama_has_the_published_parameters_beside_norms_and_embeddings() -> None:
    counts = count(config(d := 96, 4, layers := 3), context=50)
    norms = (2 * layers + 1) * d
    assert counts.parameters - counts.embedding_parameters - norms == ARCHITECTURES["llama"].parameters(layers, d, 4)


@pytest.mark.parametrize("name", ["tnl", "hgrn2", "cosformer2"])
def test_a_conversion_has_the_published_parameters_but_for_what_it_adds(name: str) -> None:
    """A conversion differs by vectors (gains, biases, decays, the branch's scale), and where named here."""
    d, h, layers = 96, 4, 3
    options = {"window": 0} | ({} if name == "hgrn2" else {"rank": d // h})
    student = build_student(AutoModelForCausalLM.from_config(config(d, h, layers)), name, **options)
    recurrence = student.mixers[0].recurrence
    matrices = sum(p.numel() for n, p in recurrence.named_parameters() if n.startswith("norm.gate.") and p.dim() > 1)
    published = ARCHITECTURES[name].parameters(layers, d, h) - ARCHITECTURES["llama"].parameters(layers, d, h)
    if name == "tnl":
        assert layers * matrices == published
    elif name == "cosformer2":  # no position term after the embedding: the teacher's embedding stays as it is
        assert layers * matrices == published - d * d // h
    else:  # the forget gate is a map of the teacher's keys, and q has one too
        assert layers * recurrence.lower_bound.numel() == published
        assert recurrence.q_map.weight.numel() + recurrence.k_map.weight.numel() == 2 * d * d // h
    counts = count(config(d, h, layers), make_plan(layers, name, **options))
    assert counts.new_parameters == sum(p.numel() for m in student.mixers for p in m.new_parameters().values())
    assert math.isfinite(counts.flops_per_token)
