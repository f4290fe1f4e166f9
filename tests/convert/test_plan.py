"""Plans: what `--to` and the options beside it mean, what they refuse, and that they survive being written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linearize.convert import ConversionError, as_teacher, build_student
from linearize.convert.plan import ALIASES, KEEP, LayerPlan, Plan, make_plan
from linearize.convert.plan_text import format_layers, parse_layers
from linearize.convert.surgery import new_parameters
from tests.families import random_teacher


def names(plan: Plan) -> list[str]:
    return [layer.mixer for layer in plan.layers]


def test_a_name_alone_covers_every_layer() -> None:
    assert names(make_plan(3, "rodimus")) == ["rodimus"] * 3


def test_stretches_of_layers_and_parts_that_continue_the_entry_before() -> None:
    plan = make_plan(12, "rodimus:0-3,8-10,tnl:4-7,keep:11")
    assert names(plan) == ["rodimus"] * 4 + ["tnl"] * 4 + ["rodimus"] * 3 + [KEEP]
    assert plan.kept == [11] and plan.name == "rodimus+tnl"


def test_rat_swa_alternates_within_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tnl-swa", (LayerPlan("tnl"), LayerPlan("swa", {"window": 1024})))
    plan = make_plan(6, "rodimus:0,tnl-swa:1-5")
    assert names(plan) == ["rodimus", "tnl", "swa", "tnl", "swa", "tnl"]
    assert plan.layers[2].options == {"window": 1024} and plan.layers[1].options == {}
    assert names(make_plan(4, "tnl-swa", "25%")) == ["tnl", "swa", "tnl", KEEP]


def test_the_alias_is_what_it_says() -> None:
    assert ALIASES["rat-swa"] == (LayerPlan("rat"), LayerPlan("swa", {"window": 1024}))


def test_an_option_reaches_every_mixer_that_has_it_and_a_named_one_alone() -> None:
    plan = make_plan(3, "rodimus:0,tnl:1,softmax:2", window=8, **{"tnl.rank": 4})
    assert [layer.options for layer in plan.layers] == [{"window": 8}, {"window": 8, "rank": 4}, {}]


@pytest.mark.parametrize("keep", ["25%", "1"])
def test_kept_layers_win_over_the_plan_but_not_over_its_channel_mixer(keep: str) -> None:
    plan = make_plan(4, "rodimus:0-1,tnl:2-3", keep, ffn="cdmoe", ffn_options={"experts": 16, "top_k": 2})
    kept = {"25%": 3, "1": 1}[keep]
    assert plan.kept == [kept]
    assert plan.layers[kept] == LayerPlan(KEEP, {}, "cdmoe", {"experts": 16, "top_k": 2})


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("rodimus:0-2", {}, "leaves out layer 3"),
        ("rodimus:0-3,tnl:2", {}, "names layer 2 more than once"),
        ("rodimus:0-4", {}, "no layer 4"),
        ("rodimus:a-b", {}, "'a-b' are not understood"),
        ("rodimus:3-0", {}, "'3-0' are none"),
        ("rodimus,tnl", {}, "'rodimus' says no layers"),
        ("rodimos", {}, "did you mean 'rodimus'"),
        ("tnl", {"chunk": 3}, "option chunk = 3"),
        ("rodimus:0-1,tnl:2-3", {"swa.window": 3}, "option swa.window = 3"),
        ("tnl", {"window": -1}, "option window = -1 of mixer 'tnl'"),
        ("tnl", {"ffn": "mlp"}, "no channel mixer is named 'mlp'"),
        ("tnl", {"ffn_options": {"experts": 4}}, "the plan has no ffn"),
        ("tnl", {"ffn": "cdmoe", "ffn_options": {"experts": 5}}, "no square number"),
        ("nowhere.yaml", {}, "no such file"),
    ],
)
def test_mistakes_are_one_line_that_names_them(to: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError) as error:
        make_plan(4, to, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {layers: 0-3, mixer: tnl, widow: 1}", "0.widow = 1"),
        ("- {layers: 0-3}", "0.mixer"),
        ("mixer: tnl", "valid list"),
        ("- {layers: [0, 1], mixer: tnl}", "leaves out layer 2-3"),
        ("- {layers: 0-3, mixer: tnl, ffn_options: {experts: 4}}", "ffn_options without ffn"),
        ("- {layers: 0-3, mixer: tnl, options: {widow: 1}}", "option widow = 1 of mixer 'tnl'"),
        ("- {layers: 0-3, mixer: keep, options: {window: 1}}", "keep leaves"),
        ("- {layers: 0-3", "is no YAML"),
    ],
)
def test_a_plan_file_names_the_key_that_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConversionError) as error:
        make_plan(4, str(tmp_path / "plan.yaml"))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_plan_file_is_a_to(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(
        "- {layers: 0-1, mixer: rodimus, options: {window: 4}}\n"
        "- {layers: [3], mixer: keep, ffn: cdmoe, ffn_options: {experts: 16, top_k: 2}}\n"
        "- {layers: 2, mixer: swa}\n"
    )
    plan = make_plan(4, str(file), window=9, ffn="cdmoe", ffn_options={"heads": 1})
    assert [layer.options for layer in plan.layers] == [{"window": 9}, {"window": 9}, {"window": 9}, {}]
    assert [layer.ffn for layer in plan.layers] == ["cdmoe"] * 4
    assert plan.layers[3].ffn_options == {"experts": 16, "top_k": 2, "heads": 1} and plan.layers[0].ffn_options == {
        "heads": 1
    }


layer_plans = st.one_of(
    st.builds(
        LayerPlan,
        st.sampled_from(["rodimus", "tnl", "swa"]),
        st.fixed_dictionaries({}, optional={"window": st.integers(1, 3)}),
        ffn=st.just("cdmoe"),
        ffn_options=st.fixed_dictionaries({}, optional={"heads": st.integers(1, 2)}),
    ),
    st.builds(LayerPlan, st.just(KEEP), st.just({})),
)
plans = st.lists(layer_plans, min_size=1, max_size=9).map(lambda layers: Plan(tuple(layers)))


@given(plans)
def test_a_written_plan_is_read_back_as_it_was(plan: Plan) -> None:
    assert Plan.from_yaml(len(plan.layers), plan.to_yaml()) == plan
    assert Plan.from_config(json.loads(json.dumps(plan.to_config()))) == plan


def test_configurations_written_before_there_were_channel_mixers_are_read() -> None:
    written = [{"mixer": "tnl", "options": {"window": 4}}, {"mixer": "keep", "options": {}}]
    plan = Plan.from_config(written)
    assert plan.layers == (LayerPlan("tnl", {"window": 4}), LayerPlan(KEEP)) and plan.to_config() == written


@given(st.sets(st.integers(0, 40), min_size=1).map(sorted))
def test_layers_are_written_as_they_are_read(layers: list[int]) -> None:
    assert parse_layers(format_layers(layers), 41, "here") == layers
    assert parse_layers("all", 41, "here") == list(range(41))


@torch.no_grad()
def test_a_mixed_student_is_its_teacher_when_asked_and_lists_its_new_tensors() -> None:
    teacher = random_teacher("llama", num_hidden_layers=3)
    ffn = {"ffn": "cdmoe", "ffn_options": {"experts": 16, "top_k": 2}}
    student = build_student(teacher, "rodimus:0,keep:1,tnl:2", **ffn)
    own, new = dict(teacher.named_parameters()), new_parameters(student)
    assert set(new) == set(dict(student.named_parameters())) - set(own)
    assert {name.split(".")[2] for name in new if "mlp" in name} == {"0", "1", "2"}
    torch.manual_seed(0)
    for parameter in new.values():
        parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.randint(2, 64, (2, 20))
    expected = teacher(input_ids=ids, use_cache=False).logits
    assert not torch.allclose(student(input_ids=ids, use_cache=False).logits, expected, rtol=0.01)
    with as_teacher(student):
        assert torch.equal(student(input_ids=ids, use_cache=False).logits, expected)
