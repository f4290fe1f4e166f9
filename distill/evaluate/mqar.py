"""Multi-query associative recall (MQAR): pairs of key and value, then the keys again, each to be answered by its value.

Source: Zoology (arXiv 2312.04927). A sequence of T tokens is

    k1 v1 k2 v2 ... kN vN  0 0 k2 0 0 0 k1 0 ...

Keys are drawn without repetition from the lower half of the vocabulary and values from the upper half; 0 is a blank.
Every key comes again, once as a rule, at a random later position. The model answers at the query itself: its output there shall
be the value. Loss and accuracy are of the answers alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

IGNORED = -100
"""Label of positions that ask nothing."""


@dataclass(frozen=True)
class Task:
    """What sequences look like.

    Attributes:
        vocabulary: tokens, the blank 0 included.
        length: tokens of a sequence; at least 2 + repeats per pair.
        pairs: numbers of pairs that are measured, each on its own.
        easier: numbers of pairs that are only trained on beside those.
        repeats: times that every key is asked; more give a denser lesson.
        power: gaps between a pair and its query are drawn with `p ∝ gap^(power - 1)`; 1 is uniform.
    """

    vocabulary: int = 8_192
    length: int = 256
    pairs: tuple[int, ...] = (16, 32, 64)
    easier: tuple[int, ...] = (4, 8)
    repeats: int = 1
    power: float = 0.01

    def __post_init__(self) -> None:
        most = max((*self.pairs, *self.easier))
        needed = (2 + self.repeats) * most
        if needed > self.length:
            raise ValueError(f"{most} pairs and their queries do not fit in {self.length} tokens; give {needed}")
        if most > self.vocabulary // 2 - 1:
            raise ValueError(f"{most} different keys do not fit in a vocabulary of {self.vocabulary}")


def make_batch(task: Task, size: int, pairs: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels `[size, T]`, on the generator's device and a function of its state.

    Labels are `IGNORED` except at the queries.
    """
    device, half = generator.device, task.vocabulary // 2

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    keys = uniform(size, half - 1).topk(pairs).indices + 1
    values = (uniform(size, pairs) * (task.vocabulary - half)).long().clamp_max(task.vocabulary - half - 1) + half
    ids = torch.zeros(size, task.length, dtype=torch.long, device=device)
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values

    # The places of the queries, without repetition: the largest of log weight + Gumbel noise.
    gap = torch.arange(1, task.length - 2 * pairs + 1, device=device)
    noise = -(-uniform(size, gap.numel()).clamp_min(1e-20).log()).clamp_min(1e-20).log()
    places = ((task.power - 1) * gap.log() + noise).topk(pairs * task.repeats).indices + 2 * pairs
    places = places.gather(1, uniform(*places.shape).argsort(1))  # which key stands where is drawn apart
    keys, values = keys.repeat(1, task.repeats), values.repeat(1, task.repeats)
    labels = torch.full_like(ids, IGNORED)
    return ids.scatter(1, places, keys), labels.scatter(1, places, values)


def answer_logits(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[answers, vocabulary]` where labels ask for something, and the labels there."""
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    asked = labels != IGNORED
    return model.get_output_embeddings()(hidden[asked]), labels[asked]


def answer_loss(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the answers, the mean per answer in nats."""
    logits, wanted = answer_logits(model, ids, labels)
    return F.cross_entropy(logits.float(), wanted)


@torch.no_grad()
def accuracy(model: PreTrainedModel, task: Task, pairs: int, examples: int = 512, seed: int = 1) -> float:
    """Share of answers that are the model's first choice, over the whole vocabulary.

    Args:
        seed: of the examples; even numbers are left to training.
    """
    generator = torch.Generator(model.device).manual_seed(2 * seed + 1)
    right = asked = 0
    for start in range(0, examples, 128):
        ids, labels = make_batch(task, min(128, examples - start), pairs, generator)
        logits, wanted = answer_logits(model, ids, labels)
        right += int((logits.argmax(-1) == wanted).sum())
        asked += wanted.numel()
    return right / asked
