"""Tables of an evaluation: recovery, closeness to the teacher, retrieval."""

from __future__ import annotations

from linearize.convert.card_sections import Table
from linearize.convert.written import number, percent
from linearize.distill.evaluate.branches import USES
from linearize.distill.evaluate.language import perplexity
from linearize.distill.evaluate.recovery import TaskScore
from linearize.distill.evaluate.suite import Evaluation
from linearize.distill.report.measurements import evaluation_conditions


def recovery_table(evaluation: Evaluation) -> Table | None:
    """Every score for which guessing has a number."""
    if not evaluation.tasks:
        return None
    rows = [
        (task.task, task.metric, _with_error(task.student, task.student_error),
         _with_error(task.teacher, task.teacher_error), number(task.chance), _recovery(task), number(task.samples))
        for task in evaluation.tasks
    ]  # fmt: skip
    limit = evaluation.conditions.settings.limit
    harness = evaluation.harness
    caption = " ".join(
        [
            "± is one standard error.",
            "* The teacher is within two standard errors of guessing: its recovery says nothing."
            if any(task.recovery is not None and task.teacher_is_at_chance for task in evaluation.tasks)
            else "",
            f"Standard tasks by lm-evaluation-harness {harness.version}, questions from {harness.source}."
            if harness
            else "",
            f"At most {limit:,} questions per task." if limit and harness else "",
            evaluation_conditions(evaluation),
        ]
    )
    columns = ("task", "metric", "student", "teacher", "guessing", "recovery", "samples")
    return Table(columns, rows, labels=2, caption=" ".join(caption.split()))


def _with_error(value: float, error: float | None) -> str:
    return number(value) if error is None else f"{number(value)} ± {number(float(f'{error:.2g}'))}"


def _recovery(task: TaskScore) -> str:
    if task.recovery is None:
        return "none"
    return percent(task.recovery) + (" *" if task.teacher_is_at_chance else "")


def language_table(evaluation: Evaluation) -> Table | None:
    """Perplexity, and how close the predictions are."""
    if (score := evaluation.language) is None:
        return None
    rows = [("perplexity per token", number(score.perplexity), number(score.teacher_perplexity))]
    if score.byte_perplexity is not None:
        rows.append(("perplexity per byte", number(score.byte_perplexity), number(score.teacher_byte_perplexity)))
    rows += [
        ("KL to the teacher, nats per token", number(score.kl), "—"),
        ("same first choice as the teacher", percent(score.top1_agreement), "—"),
        ("teacher's first choice among the first five", percent(score.top5_agreement), "—"),
    ]
    context = evaluation.conditions.settings.context
    caption = evaluation_conditions(evaluation, f"{score.tokens:,} tokens, at most {context:,} at a time")
    return Table(("", "student", "teacher"), rows, caption=caption)


def branch_table(evaluation: Evaluation) -> Table | None:
    """What the student is with one branch alone."""
    if (score := evaluation.branches) is None:
        return None
    names = {"both": "both branches", "window": "window alone", "recurrence": "recurrence alone"}
    rows = [(names[use], number(perplexity(score.loss[use])), number(score.loss[use])) for use in USES]
    caption = evaluation_conditions(
        evaluation, "in all hybrid layers at once", f"{score.tokens:,} tokens at a context of {score.context:,}"
    )
    return Table(("branches", "perplexity", "nats per token"), rows, caption=caption)


def retrieval_table(evaluation: Evaluation) -> Table | None:
    """Answers copied out of a context."""
    if (score := evaluation.retrieval) is None:
        return None
    mine, theirs = score.student, score.teacher
    rows = [
        ("whole answers right", percent(mine.accuracy), percent(theirs.accuracy)),
        ("tokens right", percent(mine.token_accuracy), percent(theirs.token_accuracy)),
        ("nats per answer token", number(mine.nats), number(theirs.nats)),
    ]
    caption = evaluation_conditions(
        evaluation, f"{score.name}: {score.samples:,} questions of {mine.tokens:,.0f} tokens on average",
        f"guessing {percent(score.chance)}", text=False,
    )  # fmt: skip
    return Table((score.name, "student", "teacher"), rows, caption=caption)
