"""The model card: what a record holds is in it, what it lacks leaves no trace, its Markdown stays whole."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from linearize.convert.card import PLACEHOLDER, render_card
from linearize.convert.written import fenced, number, percent, size

RECORD: dict[str, Any] = {
    "teacher": "meta-llama/Llama-3.2-1B",
    "to": "rodimus",
    "out": "/home/me/llama-rodimus",
    "command": "convert meta-llama/Llama-3.2-1B --to rodimus --keep-softmax 0,3",
    "license": "llama3.2",
    "revision": "4e20de362430cd3b72f300e6b0f18e50e7166e08",
    "seed": 7,
    "device": "one NVIDIA H200",
    "dtype": "bfloat16",
    "data": "the Python standard library",
    "context": 1024,
    "heldout_tokens": 147477,
    "perplexity": {"teacher": 13.981, "surgery": 812.4, "transfer": 17.25, "student": 15.2},
    "kl": 0.0812,
    "top1_agreement": 0.853,
    "control": {"to": "swa (window 64)", "perplexity": 16.5, "kl": 0.151, "top1_agreement": 0.801},
    "state_bytes": {"1024": 131072, "32768": 131072},
    "kv_bytes": {"1024": 1048576, "32768": 33554432},
    "tokens": {"transfer": 1_048_576, "lora": 2_097_152},
    "stage_seconds": {"surgery": 1.25, "transfer": 61.3, "lora": 118.9},
    "seconds": 190.4,
    "plan": [
        {"mixer": "keep", "options": {}},
        {"mixer": "rodimus", "options": {"window": 64}},
        {"mixer": "rodimus", "options": {"window": 64}},
        {"mixer": "keep", "options": {}},
    ],
    "parameters": {"total": 1_240_000_000, "new": 3_456_789, "trained": 12_345_678},
    "sample": {"prompt": "def area(r):\n", "teacher": "    return pi * r", "student": "    return r | 3"},
    "versions": {"linearize": "0.1.0", "torch": "2.13.0"},
    "gate": {
        "passed": True,
        "checks": [{"name": "reload", "value": 1.25e-7, "limit": 1e-4, "detail": "", "passed": True}],
    },
}


def record(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(RECORD), **changes}


def metadata(card: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert match is not None
    return yaml.safe_load(match[1])


def section(card: str, title: str) -> str:
    """The text under a heading; lines in code blocks are no headings."""
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", card, re.DOTALL | re.MULTILINE)
    assert match is not None, title
    return match[1]


def table(text: str) -> list[list[str]]:
    """The cells of a table's rows, with its heading."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    assert len({len(row) for row in rows}) == 1, "every row has the same number of cells"
    return [[value.strip() for value in row] for i, row in enumerate(rows) if i != 1]


def test_every_measured_number_is_in_the_card():
    card = render_card(RECORD)
    assert metadata(card) == {
        "base_model": "meta-llama/Llama-3.2-1B",
        "base_model_relation": "finetune",
        "license": "llama3.2",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["linearize", "linear-attention", "rodimus"],
    }
    assert card.count("\n# ") == 1 and "in 2 of 4 layers" in card and "teacher's own attention: 0, 3." in card
    assert RECORD["command"] in section(card, "Made with")
    results = section(card, "Results")
    assert table(results)[1:] == [
        ["teacher", "13.98", "—", "—"],
        ["after surgery", "812.4", "—", "—"],
        ["after transfer", "17.25", "—", "—"],
        ["**this student**", "15.2", "0.0812", "85.3 %"],
        ["control: swa (window 64) alone, same training", "16.5", "0.151", "80.1 %"],
    ]
    assert "147,477 tokens of held-out text, of the Python standard library, at a context of 1,024" in results
    assert table(section(card, "Speed and memory"))[1:] == [
        ["1,024", "128 KiB", "1 MiB", "8.0×"],
        ["32,768", "128 KiB", "32 MiB", "256.0×"],
    ]
    assert table(section(card, "Layers"))[1:] == [
        ["0", "softmax, the teacher's own", ""],
        ["1–2", "`rodimus`", "window=64"],
        ["3", "softmax, the teacher's own", ""],
    ]
    training = section(card, "Training and size")
    assert table(training)[1:] == [
        ["transfer", "1,048,576", "61.3"],
        ["lora", "2,097,152", "118.9"],
        ["surgery", "—", "1.25"],
    ]
    assert "1,240,000,000 total, 3,456,789 new, 12,345,678 trained" in training
    assert "190.4 seconds" in training
    assert table(section(card, "Parity gate"))[1:] == [["reload", "1.25e-07", "0.0001", "passed"]]
    origin = dict(table(section(card, "Where it comes from"))[1:])
    assert origin["teacher's revision"] == RECORD["revision"] and origin["seed"] == "7"
    assert origin["device"] == "one NVIDIA H200" and origin["dtype"] == "bfloat16"
    assert origin["versions"] == "linearize 0.1.0, torch 2.13.0"
    assert all(text.strip() in section(card, "A sample") for text in RECORD["sample"].values())
    limits = section(card, "Known limits")
    assert "15.2, the teacher's 13.98 (+8.7 %)" in limits and "14.7 % of positions" in limits
    assert "0.0812 nats" in limits and "2 layers that keep" in limits
    assert "ntrained" not in card and "failed" not in card.lower()
    assert PLACEHOLDER in section(card, "Load it") and "trust_remote_code=True" in section(card, "Load it")
    assert "\n\n\n" not in card and not re.search(r"[^\n]\n## ", card), "headings stand free, no holes"


@pytest.mark.parametrize("missing", [[key] for key in RECORD] + [[], list(RECORD)])
@pytest.mark.parametrize("how", ["absent", "none"])
def test_what_is_missing_leaves_no_trace(missing, how):
    changed = {k: v for k, v in RECORD.items() if k not in missing}
    card = render_card(changed if how == "absent" else {**changed, **dict.fromkeys(missing)})
    assert metadata(card)["library_name"] == "transformers"
    prose = re.sub(r"```.*?```", "[code]", card, flags=re.DOTALL)
    assert "None" not in prose and "Undefined" not in prose and "\n\n\n" not in card
    for title in ("Load it", "Parity gate", "Known limits"):
        assert section(card, title).strip()
    for part in re.split(r"^## ", prose, flags=re.MULTILINE)[1:]:
        assert part.split("\n", 1)[1].strip(), f"an empty section: {part}"


def test_an_untrained_student_says_so():
    perplexity = {"teacher": 13.981, "surgery": 812.4, "transfer": None, "student": 812.4}
    card = render_card(record(perplexity=perplexity, tokens={"transfer": 0, "lora": 0}, control=None))
    assert "> **Untrained.**" in card and "**Untrained**" in section(card, "Known limits")
    rows = table(section(card, "Results"))
    assert [row[0] for row in rows[1:]] == ["teacher", "**this student** (surgery only, untrained)"]
    assert rows[2][1] == "812.4"
    for tokens in ({"transfer": 0, "lora": 5}, {"transfer": 5, "lora": 0}):
        assert "ntrained" not in render_card(record(perplexity=perplexity, tokens=tokens))
    exported = render_card({"plan": RECORD["plan"]})
    assert "ntrained" not in exported and "how much of the teacher it kept is unknown" in exported


def test_every_stage_that_was_scored_has_its_row():
    """The last stage's is the student's own; a stage without a score has none."""
    stages = [
        {"name": "matrix", "perplexity": 40.5, "kl": 1.25, "top1_agreement": 0.5},
        {"name": "quiet"},
        {"name": "hidden", "perplexity": 20.5, "kl": 0.25, "top1_agreement": 0.75},
        {"name": "logits", "perplexity": 15.2, "kl": 0.0812, "top1_agreement": 0.853},
    ]
    rows = table(section(render_card(record(stages=stages, control=None)), "Results"))[1:]
    assert rows == [
        ["teacher", "13.98", "—", "—"],
        ["after surgery", "812.4", "—", "—"],
        ["after matrix", "40.5", "1.25", "50.0 %"],
        ["after hidden", "20.5", "0.25", "75.0 %"],
        ["**this student**", "15.2", "0.0812", "85.3 %"],
    ]


def test_a_student_that_the_control_beats_says_so():
    control = {"to": "swa", "perplexity": 15.1, "kl": 0.08, "top1_agreement": 0.86}
    assert "the new mixers gain nothing here" in render_card(record(control=control))
    assert "gain nothing" not in render_card(RECORD)


def test_a_failed_gate_stands_out_and_details_stay_in_their_cell():
    checks = [
        {"name": "a|b", "value": float("nan"), "limit": 0, "detail": "Error: x\n| y", "passed": False},
        {"name": "fine", "value": 0, "limit": 0, "detail": "", "passed": True},
    ]
    card = render_card(record(gate={"passed": False, "checks": checks}))
    assert "> **This checkpoint failed the parity gate**" in card
    rows = table(section(card, "Parity gate"))
    assert rows[1] == ["a\\|b", "not finite", "0", "**failed** Error: x \\| y"]
    assert rows[2] == ["fine", "0", "0", "passed"]


@pytest.mark.parametrize(
    ("teacher", "shown"),
    [
        ("/home/me/models/llama", "llama"),
        ("./llama/", "llama"),
        ("~/llama", "llama"),
        ("C:\\models\\llama", "llama"),
        ("llama (bundled)", "llama (bundled)"),
        ("a/b/c", "c"),
    ],
)
def test_only_a_hub_id_becomes_the_base_model_and_paths_stay_private(teacher, shown):
    card = render_card(record(teacher=teacher))
    assert "base_model" not in card and "huggingface.co" not in card
    assert f"\n# {shown} with rodimus" in card and f"| teacher | {shown} |" in card
    assert "/home/me" not in card


def test_a_folder_that_looks_like_a_hub_id_is_no_base_model(tmp_path: Path, monkeypatch):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    assert metadata(render_card(record(teacher="models/llama")))["base_model"] == "models/llama"
    monkeypatch.chdir(tmp_path)
    assert "base_model" not in metadata(render_card(record(teacher="models/llama")))


@pytest.mark.parametrize(
    ("license", "expected"),
    [
        ("Apache-2.0", {"license": "apache-2.0"}),
        (None, {"license": "other"}),
        ("", {"license": "other"}),
        ("My Licence: v1", {"license": "other", "license_name": "my-licence-v1"}),
    ],
)
def test_the_licence_is_inherited_or_other(license, expected):
    found = metadata(render_card(record(license=license)))
    assert {key: found[key] for key in found if key.startswith("license")} == expected


def test_text_cannot_break_out_of_its_block():
    """Backticks in a sample, quotes in a prompt, braces anywhere: the card's blocks and code stay whole."""
    nasty = 'say("hi")\n```\n## Not a heading\n{{ 1 + 1 }} {% if %} </s> ``````'
    sample = dict.fromkeys(("prompt", "teacher", "student"), nasty)
    card = render_card(record(sample=sample, command="a `b` {{c}}"))
    assert card.count(fenced(nasty)) == 3 and card.count("`" * 7) == 6
    assert "a `b` {{c}}" in card
    code = re.search(r"```python\n(.*?)\n```", card, re.DOTALL)
    assert code is not None
    texts = {node.value for node in ast.walk(ast.parse(code[1])) if isinstance(node, ast.Constant)}
    assert nasty in texts and PLACEHOLDER in texts


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (number(1234567), "1,234,567"),
        (number(13.98123), "13.98"),
        (number(1.2345e-4), "0.0001234"),
        (number(123456.7), "123,457"),
        (number(float("inf")), "not finite"),
        (number(None), "—"),
        (percent(0.8532), "85.3 %"),
        (percent(float("nan")), "not finite"),
        (size(0), "0 B"),
        (size(1023), "1023 B"),
        (size(1536), "1.5 KiB"),
        (size(2**50), "1024 TiB"),
    ],
)
def test_how_values_are_written(written, expected):
    assert written == expected
