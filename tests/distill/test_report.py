"""The report: made from saved measurements alone, whole in a browser, every number the record's."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
import yaml

from linearize.convert import ConversionError
from linearize.convert.hub import push
from linearize.convert.verify import GateReport
from linearize.convert.written import number, percent, size
from linearize.distill.evaluate.associative import MqarScore
from linearize.distill.evaluate.branches import BranchUse, LayerUse
from linearize.distill.evaluate.language import LanguageScore
from linearize.distill.evaluate.needle import Cell, NeedleScore
from linearize.distill.evaluate.positions import PositionCurve, PositionScore
from linearize.distill.evaluate.retrieval import RetrievalResult, RetrievalScore
from linearize.distill.evaluate.speed import SpeedPoint, SpeedScore
from linearize.distill.evaluate.state import LayerState, StateUse
from linearize.distill.evaluate.suite import Conditions, Evaluation, Settings
from linearize.distill.report import write_report
from linearize.distill.report.limits import TESTED_FAMILIES
from linearize.recipes.cli import main
from tests.families import FAMILIES

HOSTILE = '$x_{1}$</pre></svg><script>alert(1)</script>|` [a](b) ](c) **&amp; "quoted" \'é'
KEYS = {
    "plan", "losses", "layer-errors", "positions", "needle", "mqar", "branches", "state", "decode", "prefill", "memory"
}  # fmt: skip
"""Keys of all figures."""


def saved_record() -> dict[str, Any]:
    """What a conversion leaves in linearize.json."""
    summary = {
        "teacher": "somebody/Tiny-1B", "to": "rodimus", "perplexity": {
            "teacher": 13.981, "surgery": 812.4, "transfer": 17.25, "student": 15.237,
        },
        "kl": 0.08123, "top1_agreement": 0.8534,
        "control": {"to": "swa (window 64)", "perplexity": 16.543, "kl": 0.1512, "top1_agreement": 0.8013},
        "stages": [
            {"name": "transfer", "kind": "transfer", "perplexity": 17.25, "kl": 0.2345, "top1_agreement": 0.7654},
            {"name": "lora", "kind": "lora", "perplexity": 15.237, "kl": 0.08123, "top1_agreement": 0.8534},
        ],
        "state_bytes": {"1024": 131_072, "32768": 131_072}, "kv_bytes": {"1024": 1_048_576, "32768": 33_554_432},
        "gate": {"passed": True, "checks": [
            {"name": "reload = memory", "value": 1.25e-7, "limit": 1e-4, "detail": "", "passed": True},
        ]},
        "seconds": 190.4, "stage_seconds": {"surgery": 1.25, "transfer": 61.3, "lora": 118.9},
        "tokens": {"transfer": 1_048_576, "lora": 2_097_152}, "data": "a text of tests", "context": 1024,
        "heldout_tokens": 147_477, "plan": [
            {"mixer": "keep", "options": {}}, {"mixer": "rodimus", "options": {"window": 64}},
            {"mixer": "rat", "options": {"chunk": 16}, "ffn": "cdmoe", "ffn_options": {}},
        ],
        "parameters": {"total": 1_240_000_000, "new": 3_456_789, "trained": 12_345_678},
        "sample": {"prompt": "def area(r):\n", "teacher": "    return pi * r", "student": "    return r | 3"},
        "seed": 7, "device": "one GPU", "dtype": "bfloat16", "revision": "4e20de36", "license": "llama3.2",
        "command": "convert somebody/Tiny-1B --to plan.yaml", "versions": {"linearize": "0.1.0", "torch": "2.13.0"},
    }  # fmt: skip
    return {
        "recipe": {"teacher": "somebody/Tiny-1B", "stages": [{"kind": "transfer"}, {"kind": "lora"}]},
        "teacher": "somebody/Tiny-1B",
        "summary": summary,
        "losses": {
            "transfer": [1 / (3 + i) for i in range(450)],
            "lora": [0.731, 0.4321, 0.5678],
            "control_transfer": [2 / (3 + i) for i in range(450)],
        },
        "layer_errors": {"surgery": [None, 0.3456, 0.4567], "student": [None, 0.1234, 0.2345]},
    }


def saved_evaluation() -> Evaluation:
    """What `linearize eval` leaves in evaluation.json."""
    edges = [1, 16, 32, 64]
    language = LanguageScore(2.7123, 2.6531, 0.0713, 0.8765, 0.9876, 4092, 13_563)
    needle = NeedleScore(
        [
            Cell(mode, length, depth, 0.25 + depth / 2, 0.75, 1.2345, 0.6789)
            for mode in ("easy", "standard") for length in (256, 512) for depth in (0.0, 1.0)
        ],
        4, 1024,
    )  # fmt: skip
    retrieval = RetrievalScore(
        "pairs",
        RetrievalResult(0.5123, 0.6123, 1.7123, 812.0),
        RetrievalResult(0.9123, 0.9523, 0.1723, 812.0),
        0.0123,
        80,
    )
    mqar = MqarScore([4, 16], [0.5123, 0.2345], [0.9345, 0.8456], 256, 32)
    points = [
        SpeedPoint(who, context, speed + 0.4, speed / 10 + context / 64, context * 1024 if who == "teacher" else 131_072, 5_000_000)
        for who, speed in (("student", 2345), ("teacher", 3456)) for context in (256, 1024)
    ]  # fmt: skip
    return Evaluation(
        Conditions(
            "tiny", "Tiny-1B", ["rodimus"], "a held-out text", Settings(seed=3), "cpu", "float32", 2, {"torch": "2.13.0"}
        ),
        language,
        PositionScore(PositionCurve(edges, [3.5, 2.25, 9.125], [30, 32, 64]), PositionCurve(edges, [3.25, 2.125, 2.5], [30, 32, 64]), 32),
        BranchUse(
            {"both": 2.6396, "window": 2.6769, "recurrence": 6.8345},
            [LayerUse(1, 64, [0.4952, 0.7201], 0.0203), LayerUse(2, 64, [0.0153, 0.0047], 0.0028)], 1023, 1024,
        ),
        StateUse([LayerState(1, "memory", (64, 64), [18.81, 19.74], [174.6, None])], 512, 512, 2),
        mqar, needle, retrieval, SpeedScore(points, 32, 2),
        tasks=[*mqar.tasks(), *needle.tasks(), *retrieval.tasks()],
        seconds=dict.fromkeys(
            ("language", "positions", "branches", "state", "mqar", "needle", "retrieval", "speed"), 1.0
        ),
    )  # fmt: skip


def student(folder: Path, record: dict[str, Any] | None = None, evaluation: Evaluation | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "linearize.json").write_text(json.dumps(saved_record() if record is None else record))
    if evaluation is not None:
        evaluation.save(folder)
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student of which everything was measured, with its report."""
    folder = student(tmp_path_factory.mktemp("report") / "tiny", evaluation=saved_evaluation())
    write_report(folder)
    return folder


class Page(HTMLParser):
    """Text and elements of a page."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed((folder / "report.html").read_text())
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def made(folder: Path) -> dict[str, bytes]:
    """All that `write_report` wrote."""
    files = [folder / "report.html", folder / "README.md", *(folder / "figures").glob("*")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_a_report_is_made_again_byte_for_byte(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a copy of the two JSON files, elsewhere, in another directory, under a user's own settings."""
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for name in ("linearize.json", "evaluation.json"):
        shutil.copy(full / name, copy)
    (tmp_path / "somebody" / "Tiny-1B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    before = made(full)
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "svg.fonttype": "path", "axes.grid": True}):
        write_report(copy)
    assert made(copy) == before
    write_report(copy)
    assert made(copy) == before, "over itself"
    assert set(before) == {"report.html", "README.md", *(f"figures/{key}.svg" for key in KEYS)}


def test_the_page_needs_nothing_else(full: Path) -> None:
    page = Page(full)
    assert not [tag for tag, _ in page.tags if tag in ("script", "iframe", "object", "embed", "img", "base")]
    loads = [
        (tag, name, value)
        for tag, attrs in page.tags
        for name, value in attrs.items()
        if name in ("src", "srcset", "action") or (name.endswith("href") and tag not in ("a", "link"))
        if not (value or "").startswith("#")
    ]
    assert not loads
    assert [attrs["href"] for tag, attrs in page.tags if tag == "link"] == ["data:,"]
    source = (full / "report.html").read_text()
    assert "@import" not in source and not re.search(r"url\((?!#)", source)
    assert len(source) < 1_000_000
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert len(ids) == len(set(ids)), "drawings on one page do not share ids"
    targets = {attrs["href"] for tag, attrs in page.tags if tag == "a" and (attrs["href"] or "").startswith("#")}
    assert targets <= {f"#{name}" for name in ids}


def test_every_number_is_the_records(full: Path) -> None:
    record, evaluation = saved_record(), saved_evaluation()
    summary, text = record["summary"], Page(full).text
    expected = [
        *map(number, summary["perplexity"].values()), number(summary["kl"]), percent(summary["top1_agreement"]),
        number(summary["stages"][0]["kl"]), percent(summary["stages"][0]["top1_agreement"]),
        number(summary["control"]["perplexity"]), percent(summary["control"]["top1_agreement"]),
        *map(size, summary["kv_bytes"].values()), "256.0×", *map(number, summary["tokens"].values()),
        *map(number, summary["stage_seconds"].values()), number(summary["parameters"]["new"]), "190.4 seconds",
        number(record["losses"]["transfer"][0]), number(record["losses"]["transfer"][-1]), "0.4321", "0.5678",
        *(number(e) for errors in record["layer_errors"].values() for e in errors if e is not None),
    ]  # fmt: skip
    assert evaluation.positions and evaluation.branches and evaluation.needle and evaluation.speed and evaluation.mqar
    expected += [
        number(p) for curve in (evaluation.positions.student, evaluation.positions.teacher) for p in curve.perplexity
    ]
    expected += [
        percent(mass) for use in evaluation.branches.layers for mass in (*use.mass_outside, use.recurrent_share)
    ]
    expected += [percent(cell.student) for cell in evaluation.needle.cells]
    expected += [number(value) for p in evaluation.speed.points for value in (p.prefill, p.decode)]
    expected += [percent(share) for share in (*evaluation.mqar.student, *evaluation.mqar.teacher)]
    expected += [percent(task.recovery) for task in evaluation.tasks if task.recovery is not None]
    expected += ["lora 3 0.731 0.5678 0.4321 0.5678", "18.8 19.7", "175 none", "51.2 %", "61.2 %", "1.712", "812 tokens"]
    missing = [value for value in expected if not re.search(rf"(?<![\d.]){re.escape(value)}(?!\d)", text)]
    assert not missing
    conditions = [
        "147,477 tokens",
        "context of 1,024",
        "one GPU",
        "bfloat16",
        "seed 7",
        "seed 3",
        "2 threads",
        "4e20de36",
    ]
    assert [words for words in conditions if words not in text] == []


def test_numbers_drawn_are_the_numbers_saved(full: Path) -> None:
    """Heights of the plotted points stand in the ratio of what they show: speeds from a zero axis."""
    evaluation = saved_evaluation()
    assert evaluation.speed
    root = ElementTree.parse(full / "figures" / "decode.svg").getroot()
    lines = [
        [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", path.get("d", ""))]
        for path in root.iter("{http://www.w3.org/2000/svg}path")
        if path.get("clip-path") and re.search(r"stroke: var\(--(student|teacher)\)", path.get("style", ""))
    ]
    assert [len(line) for line in lines] == [2, 2]
    zero = max(
        float(use.get("y", 0)) for use in root.iter("{http://www.w3.org/2000/svg}use")
    )  # the x axis, where ticks stand
    speeds = [[p.decode for p in evaluation.speed.points if p.model == who] for who in ("student", "teacher")]
    ratios = [
        (zero - y) / value
        for ys, values in zip(lines, speeds, strict=True)
        for y, value in zip(ys, values, strict=True)
    ]
    assert max(ratios) / min(ratios) == pytest.approx(1, abs=0.01)


def test_figures_have_axes_titles_and_words(full: Path) -> None:
    page = Page(full)
    drawn = {attrs["id"] for tag, attrs in page.tags if tag == "figure"}
    assert drawn == {f"figure-{key}" for key in KEYS}
    for key in KEYS:
        root = ElementTree.parse(full / "figures" / f"{key}.svg").getroot()
        assert len(root.get("aria-label", "")) > 40 and root.get("role") == "img"
        words = [" ".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert len(words) >= 5 and not [word for word in words if "$" in word]
        source = (full / "figures" / f"{key}.svg").read_text()
        used = set(re.findall(r"var\((--[\w-]+)\)", source))
        assert used <= set(re.findall(r"(--[\w-]+):#", source)) and "prefers-color-scheme:dark" in source
        assert not re.findall(r"#0101\w\w", source), "every stand-in became a variable"
        body = re.sub(r"<style>.*?</style>", "", source)
        assert not re.findall(r"(?:fill|stroke): (?!none|var)[^;\"]+", body), "no colour is fixed"


def test_the_card_shows_the_same_figures(full: Path) -> None:
    card = (full / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "somebody/Tiny-1B" and front["license"] == "llama3.2"
    assert front["tags"] == ["linearize", "linear-attention", "rat", "rodimus"]
    shown = re.findall(r"^!\[([^\n]+)\]\((figures/[a-z-]+\.svg)\)$", card, re.MULTILINE)
    assert {path for _, path in shown} == {f"figures/{key}.svg" for key in KEYS}
    assert all((full / path).is_file() for _, path in shown)
    alts = dict((path, alt) for alt, path in shown)
    assert "positions 16 to 31: student 9.488, teacher 8.373" in alts["figures/positions.svg"]
    assert "at 1,024 tokens: student 250.5, teacher 361.6" in alts["figures/decode.svg"]
    assert "| needle, easy | weighted accuracy |" in card and "Not measured" not in card
    assert "convert somebody/Tiny-1B --to plan.yaml" in card and "4e20de36" in card
    assert "\n\n\n" not in card and not re.search(r"[^\n]\n## ", card)


def test_limits_are_what_was_measured(full: Path) -> None:
    limits = (full / "README.md").read_text().split("## Known limits")[1]
    assert "recurrence makes 1.2 % of the hybrid layers' output" in limits and "close to a sliding window" in limits
    assert "beyond the teacher's 32 trained positions: 9.488 before" in limits
    assert (
        "Finds 50.0 % of the needles of the easy mode, its teacher 75.0 %" in limits and "4 needles per cell" in limits
    )
    assert "Slower than its teacher at generating at a context of 256, 1,024 tokens (cpu, float32)" in limits
    assert "Assisted decoding and continuous batching are refused" in limits
    assert limits in (full / "README.md").read_text() and "close to a sliding window" in Page(full).text


def test_a_plan_of_many_mixers_names_those_that_have_a_colour(tmp_path: Path) -> None:
    record = saved_record()
    for mixers, others in ((6, False), (7, True), (9, True)):
        record["summary"]["plan"] = [{"mixer": f"mixer-{i % mixers}", "options": {}} for i in range(30)]
        folder = student(tmp_path / str(mixers), record)
        write_report(folder)
        strip = (folder / "figures" / "plan.svg").read_text()
        shown = re.findall(r">(mixer-\d|others)<", strip)
        assert shown == [f"mixer-{i}" for i in range(5 if others else 6)] + ["others"] * others
        assert len(set(re.findall(r"--mixer-\d", strip.split("</style>")[1]))) == 6


def test_a_family_that_is_not_tested_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.distill.report.style.render", lambda key, *_: f'<svg id="{key}" viewBox="0 0 1 1"/>')
    assert sorted(FAMILIES) == sorted(TESTED_FAMILIES)
    for family, warned in (("olmo", True), ("llama", False)):
        folder = student(tmp_path / family, {})
        plan = [{"mixer": "gla", "options": {}}]
        (folder / "config.json").write_text(json.dumps({"linearize": {"layers": plan, "base_model_type": family}}))
        write_report(folder)
        card = (folder / "README.md").read_text()
        assert ("The family olmo is none" in card) == warned and "`gla` in place of softmax attention in 1 of 1" in card


def test_what_was_not_measured_is_named_with_its_command(tmp_path: Path) -> None:
    folder = student(tmp_path / "a")
    write_report(folder)
    text, card = Page(folder).text, (folder / "README.md").read_text()
    for title in ("needle heat map", "perplexity by position", "use of the branches", "speed of generation"):
        assert f"Not measured: {title}. linearize eval DIR measures it." in text
        assert title in card.split("## Not measured")[1].split("##")[0]
    assert sorted(file.stem for file in (folder / "figures").iterdir()) == ["layer-errors", "losses", "memory", "plan"]
    assert "were not measured; `linearize eval DIR` does" in card


def test_a_measurement_that_is_gone_takes_its_figure_along(tmp_path: Path) -> None:
    folder = student(tmp_path / "a", evaluation=saved_evaluation())
    write_report(folder)
    (folder / "evaluation.json").unlink()
    write_report(folder)
    bare = student(tmp_path / "b")
    write_report(bare)
    assert made(folder) == made(bare)


@pytest.mark.parametrize("key", [*saved_record()["summary"], "losses", "layer_errors", "recipe", "summary", "teacher"])
def test_any_part_of_the_record_may_be_missing(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.distill.report.style.render", lambda key, *_: f'<svg id="{key}" viewBox="0 0 1 1"/>')
    record = saved_record()
    record.pop(key, None)
    record.get("summary", {}).pop(key, None)
    folder = student(tmp_path / "a", record)
    write_report(folder)
    text = Page(folder).text
    assert "None" not in text and "Undefined" not in text and "Known limits" in text


def test_questions_without_an_answer_are_not_missing(tmp_path: Path) -> None:
    """No hybrid layer: the branches were asked for, and there is nothing to show."""
    settings = saved_evaluation().conditions
    folder = student(tmp_path / "a", evaluation=Evaluation(settings, seconds={"branches": 1.0, "state": 1.0}))
    write_report(folder)
    text = Page(folder).text
    assert "Not measured: use of the branches" not in text and "Not measured: needle heat map" in text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    record = saved_record()
    summary = record["summary"]
    for name in ("data", "device", "dtype", "command", "revision", "to", "license"):
        summary[name] = HOSTILE
    summary["sample"] = dict.fromkeys(("prompt", "teacher", "student"), HOSTILE)
    summary["gate"]["checks"][0] |= {"name": HOSTILE, "detail": HOSTILE, "passed": False}
    summary["plan"][1] = {"mixer": HOSTILE, "options": {HOSTILE: HOSTILE}}
    record["losses"][HOSTILE] = [1.0, 0.5]
    record["teacher"] = HOSTILE
    evaluation = json.loads(json.dumps(saved_evaluation().to_json()))
    evaluation["conditions"] |= {"data": HOSTILE, "device": HOSTILE}
    evaluation["retrieval"]["name"] = evaluation["tasks"][0]["task"] = HOSTILE
    folder = student(tmp_path / "a", record, Evaluation.from_json(evaluation))
    write_report(folder)
    page = Page(folder)
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert page.text.count("<script>alert(1)</script>") >= 10, "shown as it is"
    figures = {file.stem: ElementTree.parse(file).getroot() for file in (folder / "figures").iterdir()}
    assert set(figures) == KEYS
    assert "$x_{1}$" in "".join(figures["losses"].itertext()), "no mathematics is made of it"
    assert not [node for root in figures.values() for node in root.iter() if node.tag.endswith("script")]
    card = (folder / "README.md").read_text()
    prose = re.sub(r"(`{3,}).*?\n\1", "", card, flags=re.DOTALL)
    assert "<script" not in prose.split("---\n", 2)[2]
    for alt, path in re.findall(r"^!\[(.*)\]\((figures/[^)]*)\)$", card, re.MULTILINE):
        assert not re.search(r"(?<!\\)\]", alt) and (folder / path).is_file()
    assert yaml.safe_load(card.split("---\n")[1])["pipeline_tag"] == "text-generation"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no linearize.json"),
        ({"linearize.json": "{"}, "damaged JSON"),
        ({"linearize.json": "[]"}, "damaged JSON"),
        ({"linearize.json": "{}", "evaluation.json": "{"}, "run `linearize eval` again"),
    ],
)
def test_damaged_folders_are_refused_and_left_alone(files: dict[str, str], said: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConversionError, match=said):
        write_report(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == set(files)


def test_a_push_sends_report_and_figures(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(full, tmp_path / "a"))
    (folder / "config.json").write_text(json.dumps({"linearize": {"layers": saved_record()["summary"]["plan"]}}))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "figures" / "stray.txt").write_text("not sent")
    monkeypatch.setattr("linearize.convert.hub.verify_in_fresh_process", lambda _: GateReport([]))
    sent = dict(push(folder, "user/name", dry_run=True).files)
    assert {f"figures/{key}.svg" for key in KEYS} | {"report.html", "evaluation.json", "README.md"} < set(sent)
    assert "figures/stray.txt" not in sent


def test_the_command_prints_what_it_wrote(
    full: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = made(full)
    monkeypatch.setattr("sys.argv", ["linearize", "report", str(full), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and made(full) == before
    printed = json.loads(capsys.readouterr().out)
    assert printed["report"] == str(full / "report.html") and len(printed["figures"]) == len(KEYS)
