"""Reading long texts in bounded memory: piece by piece through the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

PIECE = 1024
"""Tokens that go through the model at a time."""


@torch.no_grad()
def read(model: PreTrainedModel, ids: torch.Tensor, piece: int = PIECE) -> Iterator[tuple[int, torch.Tensor]]:
    """Read `ids` `[B, T]` once, in order.

    Yields:
        where the piece starts, and its logits `[B, n, vocab]`.
    """
    cache: Any = None
    for start in range(0, ids.shape[1], piece):
        part = ids[:, start : start + piece].to(model.device)
        output = model(input_ids=part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        yield start, output.logits


@torch.no_grad()
def last_logits(model: PreTrainedModel, ids: torch.Tensor, keep: int, piece: int = PIECE) -> torch.Tensor:
    """Logits `[B, keep, vocab]` of the last `keep` tokens of `ids` `[B, T]`; no others are computed but one a piece."""
    cache: Any = None
    before = ids.shape[1] - keep
    bounds = [*range(0, before, piece), before, ids.shape[1]]
    for start, end in pairwise(bounds):
        if start == end:
            continue
        part = ids[:, start:end].to(model.device)
        wanted = keep if end == ids.shape[1] else 1
        output = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=wanted)
        cache = output.past_key_values
    return output.logits


@dataclass(frozen=True)
class Answer:
    """How a model takes one answer after its prompt.

    Attributes:
        exact: every token is the model's first choice, which is what greedy generation would write.
        token_share: share of the answer's tokens that are.
        nats: mean over the answer's tokens.
    """

    exact: bool
    token_share: float
    nats: float


def score_answers(
    model: PreTrainedModel, ids: torch.Tensor, answer_lengths: list[int], piece: int = PIECE
) -> list[Answer]:
    """Score rows `[B, T]` that end with answers of `answer_lengths` tokens each."""
    keep = max(answer_lengths) + 1
    logits = last_logits(model, ids, min(keep, ids.shape[1]), piece)[:, :-1].float().cpu()
    answers = []
    for row, labels, count in zip(logits, ids, answer_lengths, strict=True):
        log_p = row[-count:].log_softmax(-1)
        labels = labels[-count:].cpu()
        hits = log_p.argmax(-1) == labels
        nats = -log_p.gather(-1, labels[:, None]).mean()
        answers.append(Answer(bool(hits.all()), float(hits.double().mean()), float(nats)))
    return answers
