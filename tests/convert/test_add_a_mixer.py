"""A mixer takes one file and one decorator: the worked example of docs/adding_a_mixer.md, which shows this code."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from linearize.convert import build_student, export, verify
from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.mixers import MIXERS, register
from linearize.convert.mixers.hybrid import Hybrid, HybridOptions, Recurrence, Tokens
from tests.convert import test_mixers as contract
from tests.families import random_teacher, tiny_tokenizer

DOCUMENT = Path(__file__).parents[2] / "docs" / "adding_a_mixer.md"


class FadingOptions(HybridOptions):
    """Options of `fading`."""

    half_life: float = Field(32.0, gt=0, description="tokens after which half of the memory is gone")


class FadingRecurrence(Recurrence):
    """Linear attention on ReLU features, every head fading at its own learned rate."""

    def __init__(self, spec: AttentionSpec, options: FadingOptions, layer: int, layers: int) -> None:
        super().__init__(spec, options, layer, layers)
        self.log_rate = nn.Parameter(torch.full((spec.num_heads,), 0.6931 / options.half_life).log())

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        q, k = F.relu(tokens.q), F.relu(tokens.k)
        o, memory = tokens.linear_attention(q, k, tokens.v, self.log_decay(tokens), state)
        return o, {"memory": memory}

    def log_decay(self, tokens: Tokens) -> torch.Tensor:
        return -self.log_rate.exp().expand(*tokens.x.shape[:2], -1)

    @torch.no_grad()
    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        self.log_rate.copy_(-lookback.log())


@register
class Fading(Hybrid):
    """Linear attention that fades at one rate per head."""

    name = "fading"
    Options = FadingOptions
    recurrence_class = FadingRecurrence


MIXERS.pop("fading")  # only the tests below see it


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "fading", Fading)


def test_it_converts_and_passes_the_gate(tmp_path: Path) -> None:
    teacher = random_teacher("llama")
    teacher.save_pretrained(tmp_path / "teacher")
    tiny_tokenizer(tmp_path / "teacher")
    ids = torch.randint(2, 64, (2, 48))
    student = build_student(teacher, "fading", calibration=ids, window=8, half_life=16.0)
    report = verify(export(student, tmp_path / "teacher", tmp_path / "student"))
    assert report.passed, [check for check in report.checks if not check.passed]


@pytest.mark.parametrize("window", [0, 6])
def test_it_keeps_every_contract(window: int) -> None:
    options = {"window": window}
    contract.test_every_way_to_read_a_text_gives_the_same("fading", options, "llama")
    contract.test_a_padded_prompt_is_continued_as_if_alone("fading", options)
    contract.test_a_reordered_cache_goes_on_from_the_chosen_rows("fading", options)
    contract.test_the_cache_holds_as_many_bytes_as_the_mixer_says("fading", options)
    contract.test_gradients_reach_every_new_tensor("fading", options, "qwen2")
    contract.test_long_and_large_inputs_stay_finite("fading", options, 4096, 1.0)


@pytest.mark.parametrize("part", [FadingOptions, FadingRecurrence, Fading])
def test_the_document_shows_this_code(part: type) -> None:
    assert inspect.getsource(part).strip() in DOCUMENT.read_text()
