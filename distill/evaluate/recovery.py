"""How much of the teacher's skill the student kept, with luck taken out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskScore:
    """One number of one task, for student and teacher.

    Attributes:
        metric: what it is ("acc", "acc_norm", "nats saved", ...); larger is better.
        chance: what guessing gets.
        samples: how many questions it is a mean over; None where that means nothing.
        teacher_error: standard error of the teacher's number; None if unknown.
    """

    task: str
    metric: str
    student: float
    teacher: float
    chance: float
    samples: int | None = None
    student_error: float | None = None
    teacher_error: float | None = None

    @property
    def recovery(self) -> float | None:
        """See `recovery`."""
        return recovery(self.student, self.teacher, self.chance)

    @property
    def teacher_is_at_chance(self) -> bool:
        """Whether the teacher is less than two standard errors above chance: recovery then says nothing."""
        return self.teacher - self.chance <= 2 * (self.teacher_error or 0.0)


def recovery(student: float, teacher: float, chance: float) -> float | None:
    """`(student - chance) / (teacher - chance)`: 1 for all of the teacher, 0 for guessing, below 0 for worse.

    None when the teacher is not above chance itself, as there is nothing to recover.
    """
    return (student - chance) / (teacher - chance) if teacher > chance else None


def share_error(share: float, samples: int) -> float:
    """Standard error of a share of `samples` independent answers (the sample's, as lm-eval gives it)."""
    return (share * (1 - share) / max(1, samples - 1)) ** 0.5
