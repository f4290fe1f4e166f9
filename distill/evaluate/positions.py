"""Perplexity by position: whether a model goes on profiting from a longer context, and where it breaks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from linearize.distill.evaluate.language import perplexity
from linearize.distill.evaluate.reading import PIECE, read
from linearize.distill.progress import meter

_SLICE_ELEMENTS = 2**22


@dataclass(frozen=True)
class PositionCurve:
    """Mean loss by position of the predicted token.

    Attributes:
        edges: bucket `i` holds the positions from `edges[i]` up to `edges[i + 1]`, that one excluded; position 1 is
            the first that is predicted.
        loss: nats per token of each bucket.
        counts: predicted tokens of each bucket.
    """

    edges: list[int]
    loss: list[float]
    counts: list[int]

    @property
    def perplexity(self) -> list[float]:
        return [perplexity(loss) for loss in self.loss]


@dataclass(frozen=True)
class PositionScore:
    """The curves of student and teacher on the same tokens; `trained_to` is the teacher's longest trained position."""

    student: PositionCurve
    teacher: PositionCurve
    trained_to: int | None


def token_losses(model: PreTrainedModel, ids: torch.Tensor, piece: int = PIECE) -> torch.Tensor:
    """Loss in nats `[B, T - 1]` (float32, CPU) of every token after the first of `ids` `[B, T]`.

    Memory grows with `piece`, not with T, but for the model's own cache.
    """
    losses = torch.empty(ids.shape[0], ids.shape[1] - 1)
    for start, logits in read(model, ids, piece):
        labels = ids[:, start + 1 : start + 1 + logits.shape[1]].to(logits.device)
        rows = max(1, _SLICE_ELEMENTS // (logits.shape[-1] * logits.shape[0]))
        for first in range(0, labels.shape[1], rows):
            part = slice(first, min(first + rows, labels.shape[1]))
            log_p = logits[:, part].float().log_softmax(-1)
            taken = -log_p.gather(-1, labels[:, part, None])[..., 0]
            losses[:, start + part.start : start + part.stop] = taken.cpu()
    return losses


def bucket_edges(tokens: int, first: int = 16) -> list[int]:
    """1, 16, 32, 64, ... up to `tokens`."""
    edges = [1]
    while first < tokens:
        edges.append(first)
        first *= 2
    return [*edges, tokens]


def loss_by_position(
    model: PreTrainedModel, ids: torch.Tensor, piece: int = PIECE, name: str = "positions"
) -> PositionCurve:
    """Read sequences `[N, T]` one after another and average by position, in buckets that double."""
    edges = bucket_edges(ids.shape[1])
    sums, counts = torch.zeros(len(edges) - 1, dtype=torch.float64), [0] * (len(edges) - 1)
    with meter(name, len(ids)) as progress:
        for i, row in enumerate(ids):
            losses = token_losses(model, row[None], piece)[0].double()
            for bucket, (start, end) in enumerate(pairwise(edges)):
                sums[bucket] += losses[start - 1 : end - 1].sum()
                counts[bucket] += end - start
            progress.update(i + 1, ids.shape[1])
    return PositionCurve(edges, [float(s) / c for s, c in zip(sums, counts, strict=True)], counts)


def score_positions(
    student: PreTrainedModel, teacher: PreTrainedModel, ids: torch.Tensor, piece: int = PIECE
) -> PositionScore:
    """Both models' curves on sequences `[N, T]` of token ids."""
    curves = [
        loss_by_position(m, ids, piece, f"positions, {n}") for m, n in ((student, "student"), (teacher, "teacher"))
    ]
    return PositionScore(curves[0], curves[1], getattr(teacher.config, "max_position_embeddings", None))
