"""Needles and retrieval: what is asked is what was meant, and right answers count."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from linearize.convert.errors import ConversionError
from linearize.distill.evaluate.associative import score_mqar
from linearize.distill.evaluate.mqar import Task, make_batch
from linearize.distill.evaluate.needle import CHANCE, DIGITS, Cell, NeedleScore, find_needles, needle_prompt
from linearize.distill.evaluate.retrieval import answer_ids, read_examples, retrieve, score_retrieval
from tests.distill.test_evaluate import VOCABULARY, byte_tokenizer, ids_of, moved_student, teacher_model
from tests.families import tiny_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "evals"
HAYSTACK = ids_of(1, 4000)[0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


class Finder:
    """Stands for a model that answers a question from a table, by text; its logits point at the right token."""

    device = torch.device("cpu")
    config = SimpleNamespace(max_position_embeddings=None)

    def __init__(self, rows_to_answer: set[int]) -> None:
        self.rows = rows_to_answer
        self.read = torch.empty(0, dtype=torch.long)

    def __call__(self, input_ids: torch.Tensor, past_key_values: Any, use_cache: bool, logits_to_keep: int) -> Any:
        self.read = input_ids if past_key_values is None else torch.cat([self.read, input_ids], 1)
        following = torch.cat([input_ids[:, 1:], torch.zeros_like(input_ids[:, :1])], 1)
        logits = torch.nn.functional.one_hot(following, VOCABULARY).float() * 50
        for row in range(len(input_ids)):
            if row not in self.rows:
                logits[row] = 0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:], past_key_values="cache")


# ---------------------------------------------------------------------- needle


@settings(max_examples=40)
@given(
    mode=st.sampled_from(["easy", "standard"]),
    length=st.integers(260, 800),
    depth=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_a_needle_lies_at_its_depth_in_a_text_of_its_length(
    tokenizer: Any, mode: Any, length: int, depth: float, seed: int
) -> None:
    hay = tokenizer("t", add_special_tokens=False).input_ids[0]
    ids, count = needle_prompt(tokenizer, torch.full((900,), hay), mode, length, depth, random.Random(seed))
    assert ids.numel() == length
    number = tokenizer.decode(ids[-count:]).strip()
    assert number.isdigit() and len(number) == DIGITS
    before = tokenizer.decode(ids[:-count])
    assert before.endswith("Answer:") and before.count(number) == 1
    name = before.rsplit("number of ", 1)[1].split("?")[0]
    question = f"\nQuestion: What is the special magic number of {name}?\nAnswer:"
    needle = f"{question} {number}\n" if mode == "easy" else f"\nThe special magic number of {name} is {number}.\n"
    hidden, asked = (len(tokenizer(text, add_special_tokens=False).input_ids) for text in (needle, question))
    straw = length - hidden - asked - count
    place = round(depth * straw)
    assert tokenizer.decode(ids[place : place + hidden]) == needle
    assert tokenizer.decode(ids[-count - asked : -count]) == question
    assert ids[:place].tolist() + ids[place + hidden : length - asked - count].tolist() == [hay] * straw


def test_every_model_gets_the_same_needles_and_right_answers_count(tokenizer: Any) -> None:
    models: Any = {"student": Finder({0}), "teacher": Finder({0, 1, 2})}
    score = find_needles(models, tokenizer, HAYSTACK, (300, 400), (0.0, 1.0), samples=4, piece=128)
    assert torch.equal(models["student"].read, models["teacher"].read)
    assert [(c.mode, c.length, c.depth) for c in score.cells][:3] == [
        ("easy", 300, 0),
        ("easy", 300, 1),
        ("easy", 400, 0),
    ]
    assert {(c.student, c.teacher) for c in score.cells} == {(0.25, 0.75)}
    for task in score.tasks():
        assert (task.student, task.teacher, task.chance, task.samples) == pytest.approx((0.25, 0.75, CHANCE, 16))
        assert task.recovery == pytest.approx(1 / 3, rel=1e-3)
    first = find_needles(models, tokenizer, HAYSTACK, (300,), (0.5,), samples=2, seed=1)
    read = models["student"].read
    assert first == find_needles(models, tokenizer, HAYSTACK, (300,), (0.5,), samples=2, seed=1)
    assert torch.equal(models["student"].read, read)
    find_needles(models, tokenizer, HAYSTACK, (300,), (0.5,), samples=2, seed=2)
    assert not torch.equal(models["student"].read, read)


def test_the_weighted_accuracy_by_hand() -> None:
    cells = [Cell("easy", 100, 0.0, 1, 1, 0, 0), Cell("easy", 100, 1.0, 0, 1, 0, 0),
             Cell("easy", 400, 0.0, 0, 1, 0, 0), Cell("easy", 400, 0.5, 1, 1, 0, 0),
             Cell("standard", 100, 0.0, 0, 0, 0, 0)]  # fmt: skip
    score = NeedleScore(cells, 1, None)
    assert score.accuracy("easy", "student") == pytest.approx((100 + 200) / (100 + 10 + 400 + 200))
    assert score.accuracy("easy", "teacher") == 1 and score.accuracy("standard", "teacher") == 0
    assert score.accuracy("easy", "student", weighted=False) == 0.5


def test_needles_that_cannot_be_hidden_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="longer lengths"):
        needle_prompt(tokenizer, HAYSTACK, "easy", 40, 0.5, random.Random(0))
    with pytest.raises(ConversionError, match="haystack has 100"):
        needle_prompt(tokenizer, HAYSTACK[:100], "easy", 2000, 0.5, random.Random(0))
    tiny_tokenizer(tmp_path)
    with pytest.raises(ConversionError, match="cannot write the number"):
        needle_prompt(PreTrainedTokenizerFast.from_pretrained(tmp_path), HAYSTACK, "easy", 400, 0.5, random.Random(0))


# ---------------------------------------------------------------------- retrieval


def write(folder: Path, *entries: dict[str, Any]) -> Path:
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n", encoding="utf-8")
    return file


def test_both_kinds_of_lines_are_read(tmp_path: Path) -> None:
    pairs = 'JSON data:\n{"a": "12", "b": "34"}\n\nKey: "b"\nCorresponding Value: '
    file = write(tmp_path, {"context": pairs, "answer": "34"}, {"context": "the cat", "continuation": " sat"})
    first, second = read_examples(file)
    assert first.context.endswith('Value: "') and first.continuation == "34" and first.chance == 0.5
    assert (second.context, second.continuation, second.chance) == ("the cat", " sat", 0)
    assert len(read_examples(file, limit=1)) == 1
    file.write_text('{"context": "x"}\n')
    with pytest.raises(ConversionError, match="line 1"):
        read_examples(file)
    with pytest.raises(ConversionError, match="no such file"):
        read_examples(tmp_path / "none.jsonl")


@given(context=st.text("the catsm3: ", min_size=2).filter(str.strip), answer=st.text("09ab-", min_size=1, max_size=9))
def test_the_answer_is_all_that_follows_the_context(tokenizer: Any, context: str, answer: str) -> None:
    ids, count = answer_ids(tokenizer, context, answer)
    text = tokenizer.decode(ids[0])
    assert text.endswith(answer) and 1 <= count < ids.shape[1]
    assert tokenizer.decode(ids[0, -count:]).strip().endswith(answer)


def test_retrieval_counts_whole_answers_and_tokens(tokenizer: Any, tmp_path: Path) -> None:
    file = write(tmp_path, *({"context": "the cat sat on", "continuation": f" the {i}"} for i in range(3)))
    right = retrieve(Finder({0}), tokenizer, read_examples(file))  # type: ignore[arg-type]
    assert (right.accuracy, right.token_accuracy) == (1, 1) and right.nats < 1e-6
    wrong = retrieve(Finder(set()), tokenizer, read_examples(file))  # type: ignore[arg-type]
    assert wrong.accuracy == 0 and wrong.nats == pytest.approx(float(torch.tensor(VOCABULARY).log()))
    score = score_retrieval(moved_student(), teacher_model(), tokenizer, file, limit=2)
    assert score.samples == 2 and score.name == "pairs"
    (task,) = score.tasks()
    assert (task.student, task.teacher) == (score.student.accuracy, score.teacher.accuracy)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the key-value file is not part of the repository")
def test_the_key_value_file_is_understood(tokenizer: Any) -> None:
    examples = read_examples(SHARED / "kv_pairs_middle_len_2048.jsonl")
    assert len(examples) == 300
    for example in examples[:20]:
        assert f'"{example.continuation}"' in example.context and example.context.endswith(' "')
        assert 0.01 < example.chance < 0.1


# ---------------------------------------------------------------------- MQAR


def test_mqar_asks_both_models_the_same() -> None:
    score = score_mqar(teacher_model(), teacher_model(), (2, 5), length=40, examples=6)
    assert score.student == score.teacher and score.pairs == [2, 5]
    generator = torch.Generator().manual_seed(1)
    ids, labels = make_batch(Task(VOCABULARY, 40, (2, 5), ()), 6, 2, generator)
    with torch.no_grad():
        right = (teacher_model()(ids, use_cache=False).logits.argmax(-1) == labels)[labels >= 0]
    assert score.teacher[0] == pytest.approx(float(right.float().mean()))
    first, second = score.tasks()
    assert (first.chance, second.chance, first.samples, second.samples) == (0.5, 0.2, 12, 30)
    assert score_mqar(moved_student(), teacher_model(), (2, 5), 40, 6).teacher == score.teacher
