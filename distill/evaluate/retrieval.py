"""Retrieval from JSONL: the model must continue a context with one exact answer that stands in it.

Every line is an object with `context` and `continuation`, or with `context` and `answer` as in the key-value tasks made
of random identifiers; an answer that stands in quotes in its context is asked for with the opening quote given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.convert.errors import ConversionError
from linearize.distill.evaluate.reading import PIECE, Answer, score_answers
from linearize.distill.evaluate.recovery import TaskScore, share_error
from linearize.distill.progress import meter


@dataclass(frozen=True)
class Example:
    """One question: the text so far, what must follow, and how often a guess among the candidates is right."""

    context: str
    continuation: str
    chance: float


@dataclass(frozen=True)
class RetrievalResult:
    """One model's answers: `accuracy` is the share of answers right to the last token, `nats` a mean per answer token.

    `tokens` is the mean length of context and answer.
    """

    accuracy: float
    token_accuracy: float
    nats: float
    tokens: float


@dataclass(frozen=True)
class RetrievalScore:
    """Student and teacher on one file; `chance` is the mean of one over the number of keys in the context."""

    name: str
    student: RetrievalResult
    teacher: RetrievalResult
    chance: float
    samples: int

    def tasks(self) -> list[TaskScore]:
        student, teacher = self.student.accuracy, self.teacher.accuracy
        errors = share_error(student, self.samples), share_error(teacher, self.samples)
        return [TaskScore(self.name, "exact", student, teacher, self.chance, self.samples, *errors)]


def read_examples(file: Path, limit: int | None = None) -> list[Example]:
    """The lines of a file, the first `limit` of them.

    Raises:
        ConversionError: a line is no JSON object with `context` and `continuation`, or there is none.
    """
    if not file.is_file():
        raise ConversionError(f"{file}: no such file; give JSONL with the fields context and continuation")
    examples: list[Example] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if limit is not None and len(examples) == limit:
            break
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            context, answer = str(entry["context"]), entry.get("continuation")
            if answer is None:
                answer = str(entry["answer"])
                context = context.rstrip() + ' "' if f'"{answer}"' in context else context
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConversionError(f"{file}, line {number}: not an object with context and continuation") from None
        examples.append(Example(context, str(answer), _chance(context)))
    if not examples:
        raise ConversionError(f"{file} holds no example")
    return examples


def _chance(context: str) -> float:
    """One over the number of entries of the JSON object in the context; 0 when there is none."""
    start = context.find("{")
    try:
        entries, _ = json.JSONDecoder().raw_decode(context[start:]) if start >= 0 else ({}, 0)
    except ValueError:
        entries = {}
    return 1 / len(entries) if entries else 0.0


def answer_ids(tokenizer: Any, context: str, continuation: str) -> tuple[torch.Tensor, int]:
    """Token ids `[1, T]` of context and continuation, and how many of them are the continuation's.

    The two are encoded together and cut where the context's own tokens end, so that a token boundary falls where it
    falls in running text; white space at the end of the context belongs to the answer.
    """
    bare = context.rstrip()
    whole = tokenizer(context + continuation, verbose=False).input_ids
    before = tokenizer(bare, verbose=False).input_ids
    end = [tokenizer.eos_token_id]
    whole, before = (ids[:-1] if ids[-1:] == end and len(ids) > 1 else ids for ids in (whole, before))
    count = max(1, len(whole) - len(before))
    return torch.tensor([whole]), count


def retrieve(
    model: PreTrainedModel, tokenizer: Any, examples: list[Example], piece: int = PIECE, name: str = "retrieval"
) -> RetrievalResult:
    """Score every example, one at a time, through the cache."""
    answers: list[Answer] = []
    tokens = 0
    with meter(name, len(examples)) as progress:
        for i, example in enumerate(examples):
            ids, count = answer_ids(tokenizer, example.context, example.continuation)
            answers += score_answers(model, ids, [count], piece)
            tokens += ids.shape[1]
            progress.update(i + 1, ids.shape[1])
    count = len(answers)
    return RetrievalResult(
        sum(a.exact for a in answers) / count,
        sum(a.token_share for a in answers) / count,
        sum(a.nats for a in answers) / count,
        tokens / count,
    )


def score_retrieval(
    student: PreTrainedModel, teacher: PreTrainedModel, tokenizer: Any, file: Path, limit: int | None = None
) -> RetrievalScore:
    """Both models on one JSONL file."""
    examples = read_examples(file, limit)
    results = [retrieve(m, tokenizer, examples, name=f"{file.stem}, {n}") for m, n in
               ((student, "student"), (teacher, "teacher"))]  # fmt: skip
    chance = sum(example.chance for example in examples) / len(examples)
    return RetrievalScore(file.stem, results[0], results[1], chance, len(examples))
