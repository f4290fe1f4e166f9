"""MQAR asked of a language model as it is: pairs of random tokens, then the first of a pair alone.

No training: the model has to take the pattern up from the sequence itself, as an induction head does. What small models
learn when they are trained on it is another question (`mqar_training`).
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from linearize.distill.evaluate.mqar import Task, accuracy
from linearize.distill.evaluate.recovery import TaskScore, share_error


@dataclass(frozen=True)
class MqarScore:
    """Shares of answers right, by the number of pairs in a sequence of `length` tokens.

    Attributes:
        examples: sequences for each number of pairs; each asks for all of its pairs.
    """

    pairs: list[int]
    student: list[float]
    teacher: list[float]
    length: int
    examples: int

    def tasks(self) -> list[TaskScore]:
        """Chance is to name any of the values shown."""
        scores = []
        for pairs, student, teacher in zip(self.pairs, self.student, self.teacher, strict=True):
            answers = pairs * self.examples
            errors = share_error(student, answers), share_error(teacher, answers)
            scores.append(TaskScore(f"mqar, {pairs} pairs", "acc", student, teacher, 1 / pairs, answers, *errors))
        return scores


def score_mqar(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    pairs: tuple[int, ...] = (4, 16, 32),
    length: int = 256,
    examples: int = 32,
    seed: int = 0,
) -> MqarScore:
    """Ask both models the same sequences over the student's whole vocabulary."""
    task = Task(vocabulary=student.config.vocab_size, length=length, pairs=pairs, easier=())
    found = [[accuracy(model, task, count, examples, seed) for count in pairs] for model in (student, teacher)]
    return MqarScore(list(pairs), found[0], found[1], length, examples)
