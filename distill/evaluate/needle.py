"""Needle in a haystack: a number hidden at some depth of a long text, asked for at its end.

Two modes (Scaling Laws for Linear Complexity Language Models, arXiv 2406.16690). In the easy one the needle is the
question with its answer, so that a base model can find the answer by matching the question it has read before. In the
standard one only the fact is hidden, in other words than the question's.

Everything is built from token ids: a haystack of exactly the length asked for, the needle in it, the question at the
end. An answer counts when every one of its tokens is the model's first choice, which is what greedy generation writes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from linearize.convert.errors import ConversionError
from linearize.distill.evaluate.reading import PIECE, Answer, score_answers
from linearize.distill.evaluate.recovery import TaskScore, share_error
from linearize.distill.progress import meter

Mode = Literal["easy", "standard"]
MODES: tuple[Mode, ...] = ("easy", "standard")
NAMES = (
    "Paris", "Lima", "Oslo", "Cairo", "Delhi", "Tokyo", "Quito", "Accra", "Hanoi", "Dublin", "Sofia", "Tunis", "Seoul",
    "Rome", "Doha", "Minsk",
)  # fmt: skip
QUESTION = "\nQuestion: What is the special magic number of {name}?\nAnswer:"
FACT = "\nThe special magic number of {name} is {number}.\n"
DIGITS = 5
CHANCE = 1 / (9 * 10 ** (DIGITS - 1))
"""Of guessing one number of `DIGITS` digits."""


@dataclass(frozen=True)
class Cell:
    """One place of the grid: shares of samples answered right, and mean nats per answer token.

    Attributes:
        length: tokens of the whole sequence, question and answer included.
        depth: where in the haystack the needle stands, 0 at its start, 1 at its end.
    """

    mode: Mode
    length: int
    depth: float
    student: float
    teacher: float
    student_nats: float
    teacher_nats: float


@dataclass(frozen=True)
class NeedleScore:
    """The whole grid.

    Attributes:
        samples: needles per cell.
        trained_to: the teacher's longest trained position.
    """

    cells: list[Cell]
    samples: int
    trained_to: int | None
    chance: float = CHANCE

    def accuracy(self, mode: Mode, who: Literal["student", "teacher"], weighted: bool = True) -> float:
        """Over all cells of a mode.

        Args:
            weighted: each cell counts by its length times how far back its needle lies (`1 - depth`, at least 0.1), so
                that the hard corner of the grid, long and far away, weighs most; False for the plain mean.
        """
        cells = [cell for cell in self.cells if cell.mode == mode]
        weights = [cell.length * max(0.1, 1 - cell.depth) if weighted else 1.0 for cell in cells]
        return sum(w * getattr(c, who) for w, c in zip(weights, cells, strict=True)) / sum(weights)

    def tasks(self) -> list[TaskScore]:
        scores = []
        for mode in dict.fromkeys(cell.mode for cell in self.cells):
            count = self.samples * sum(cell.mode == mode for cell in self.cells)
            student, teacher = self.accuracy(mode, "student"), self.accuracy(mode, "teacher")
            errors = share_error(student, count), share_error(teacher, count)
            name = f"needle, {mode}"
            scores.append(TaskScore(name, "weighted accuracy", student, teacher, self.chance, count, *errors))
        return scores


def needle_prompt(
    tokenizer: Any, haystack: torch.Tensor, mode: Mode, length: int, depth: float, rng: random.Random
) -> tuple[torch.Tensor, int]:
    """One sequence `[length]` that ends with its answer, and the answer's number of tokens.

    Args:
        haystack: token ids `[N]`; a random stretch of it is used.
        rng: draws name, number and stretch.

    Raises:
        ConversionError: `length` leaves no room for needle and question, the haystack is too short, or the tokenizer
            knows no digits.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    name = rng.choice(NAMES)
    number = str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    question = QUESTION.format(name=name)
    asked = encode(question)
    answer = encode(f"{question} {number}")[len(asked) :]
    if tokenizer.decode(answer).strip() != number:
        raise ConversionError(f"the tokenizer cannot write the number {number}; leave needle out of --tasks")
    needle = encode(f"{question} {number}\n") if mode == "easy" else encode(FACT.format(name=name, number=number))
    hay = length - len(needle) - len(asked) - len(answer)
    if hay < 1:
        raise ConversionError(f"a needle, its question and answer need more than {length} tokens; use longer lengths")
    if haystack.numel() < hay:
        raise ConversionError(f"the haystack has {haystack.numel():,} tokens, a length of {length:,} needs {hay:,}")
    start = rng.randrange(haystack.numel() - hay + 1)
    stretch = haystack[start : start + hay].tolist()
    place = round(depth * hay)
    return torch.tensor([*stretch[:place], *needle, *stretch[place:], *asked, *answer]), len(answer)


def find_needles(
    models: dict[str, PreTrainedModel],
    tokenizer: Any,
    haystack: torch.Tensor,
    lengths: tuple[int, ...] = (256, 512, 1024),
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0),
    modes: tuple[Mode, ...] = MODES,
    samples: int = 4,
    seed: int = 0,
    piece: int = PIECE,
) -> NeedleScore:
    """Run the grid.

    Args:
        models: "student" and "teacher"; both answer the same needles.
        haystack: token ids `[N]` of the text to hide in.
        samples: needles per cell.
    """
    places = [(mode, length, depth) for mode in modes for length in lengths for depth in depths]
    cells = []
    with meter("needle", len(places)) as progress:
        for i, (mode, length, depth) in enumerate(places):
            rng = random.Random(f"{seed} {mode} {length} {depth}")
            prompts = [needle_prompt(tokenizer, haystack, mode, length, depth, rng) for _ in range(samples)]
            rows, counts = torch.stack([ids for ids, _ in prompts]), [count for _, count in prompts]
            found = {who: _mean(score_answers(model, rows, counts, piece)) for who, model in models.items()}
            shares, nats = ({who: pair[j] for who, pair in found.items()} for j in (0, 1))
            cells.append(
                Cell(mode, length, depth, shares["student"], shares["teacher"], nats["student"], nats["teacher"])
            )
            progress.update(i + 1, rows.numel())
    longest = getattr(models["teacher"].config, "max_position_embeddings", None)
    return NeedleScore(cells, samples, longest)


def _mean(answers: list[Answer]) -> tuple[float, float]:
    return sum(a.exact for a in answers) / len(answers), sum(a.nats for a in answers) / len(answers)
