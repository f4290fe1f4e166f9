"""An evaluation, or several of one teacher side by side, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from linearize.distill.evaluate.branches import USES
from linearize.distill.evaluate.language import perplexity
from linearize.distill.evaluate.needle import Mode, NeedleScore
from linearize.distill.evaluate.recovery import TaskScore

if TYPE_CHECKING:
    from linearize.distill.evaluate.suite import Evaluation


def evaluation_text(evaluation: Evaluation) -> str:
    """One page: every answer, then tasks with chance and recovery."""
    c = evaluation.conditions
    lines = [f"{c.student}, a student of {c.teacher}"]
    lines.append(f"{c.device}, {c.dtype}, {c.threads} threads; text: {c.data}; seed {c.settings.seed}")
    for part in (_language, _positions, _branches, _state, _needle, _retrieval, _speed, _tasks):
        if rows := list(part(evaluation)):
            lines += ["", *rows]
    total = sum(evaluation.seconds.values())
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in evaluation.seconds.items())
    return "\n".join([*lines, "", f"{total:.0f} s in all ({spent})"])


def _language(evaluation: Evaluation) -> Iterator[str]:
    if (score := evaluation.language) is None:
        return
    yield f"on {score.tokens:,} held-out tokens      student    teacher"
    yield f"  perplexity per token      {score.perplexity:9.3f}  {score.teacher_perplexity:9.3f}"
    if score.byte_perplexity is not None and score.teacher_byte_perplexity is not None:
        yield f"  perplexity per byte       {score.byte_perplexity:9.4f}  {score.teacher_byte_perplexity:9.4f}"
    yield f"  KL from the teacher       {score.kl:9.4f} nats per token"
    yield f"  same first choice         {score.top1_agreement:9.1%}"
    yield f"  teacher's among first 5   {score.top5_agreement:9.1%}"


def _positions(evaluation: Evaluation) -> Iterator[str]:
    if (score := evaluation.positions) is None:
        return
    yield "perplexity by position     student    teacher"
    curve = score.student
    for i, start in enumerate(curve.edges[:-1]):
        beyond = "  beyond the teacher's trained positions" if score.trained_to and start >= score.trained_to else ""
        span = f"{start:,} to {curve.edges[i + 1] - 1:,}"
        yield f"  {span:20s} {curve.perplexity[i]:11.3f} {score.teacher.perplexity[i]:10.3f}{beyond}"


def _branches(evaluation: Evaluation) -> Iterator[str]:
    if (score := evaluation.branches) is None:
        if "branches" in evaluation.seconds:
            yield "branches: no layer has both a window and a recurrence"
        return
    losses = ", ".join(f"{use} {perplexity(score.loss[use]):.3f}" for use in USES)
    yield f"perplexity by branch ({score.tokens:,} tokens): {losses}"
    yield "layer  window  teacher's softmax outside it, per head       recurrent share of the output"
    for layer in score.layers:
        mass = " ".join(f"{m:.2f}" for m in layer.mass_outside)
        yield f"{layer.layer:5d}  {layer.window:6d}  {mass:43s}  {layer.recurrent_share:.3f}"


def _state(evaluation: Evaluation) -> Iterator[str]:
    if (score := evaluation.state) is None:
        if "state" in evaluation.seconds:
            yield "state: no layer has a matrix state"
        return
    yield f"state after {score.tokens:,} tokens"
    yield "layer  matrix     effective rank per head                      half-life per head, tokens"
    for layer in score.layers:
        rank = " ".join(f"{r:.1f}" for r in layer.rank)
        lives = " ".join("none" if life is None else f"{life:.0f}" for life in layer.half_life)
        yield f"{layer.layer:5d}  {layer.shape[0]}x{layer.shape[1]:<6d}  {rank:43s}  {lives}"


def _needle(evaluation: Evaluation) -> Iterator[str]:
    if (score := evaluation.needle) is None:
        return
    yield f"needle in a haystack, {score.samples} a cell: student / teacher (chance {score.chance:.0e})"
    for mode in dict.fromkeys(cell.mode for cell in score.cells):
        yield from _grid(score, mode)


def _grid(score: NeedleScore, mode: Mode) -> Iterator[str]:
    cells = [cell for cell in score.cells if cell.mode == mode]
    lengths = list(dict.fromkeys(cell.length for cell in cells))
    yield f"  {mode:10s}" + "".join(f"{length:>13,}" for length in lengths) + "  tokens"
    for depth in dict.fromkeys(cell.depth for cell in cells):
        row = {cell.length: cell for cell in cells if cell.depth == depth}
        shares = "".join(f"{row[n].student:>6.2f} /{row[n].teacher:5.2f}" for n in lengths)
        yield f"  depth {depth:4.2f}{shares}"


def _retrieval(evaluation: Evaluation) -> Iterator[str]:
    if (score := evaluation.retrieval) is None:
        return
    yield f"retrieval from {score.name} ({score.samples}, {score.student.tokens:,.0f} tokens): student, teacher"
    yield f"  whole answer right    {score.student.accuracy:8.3f} {score.teacher.accuracy:8.3f}   chance {score.chance:.3f}"
    yield f"  tokens right          {score.student.token_accuracy:8.3f} {score.teacher.token_accuracy:8.3f}"
    yield f"  nats per token        {score.student.nats:8.3f} {score.teacher.nats:8.3f}"


def _speed(evaluation: Evaluation) -> Iterator[str]:
    if (score := evaluation.speed) is None:
        return
    yield f"one sequence, {score.threads} threads    prefill/s   decode/s        cache bytes     peak bytes"
    for point in score.points:
        peak = "-" if point.peak_bytes is None else f"{point.peak_bytes:,}"
        name = f"{point.model} at {point.context:,}"
        yield f"  {name:22s} {point.prefill:11,.0f} {point.decode:10,.1f} {point.cache_bytes:18,} {peak:>14s}"


def _tasks(evaluation: Evaluation) -> Iterator[str]:
    if evaluation.tasks:
        yield f"{'task':34s} {'student':>9s} {'teacher':>9s} {'chance':>9s}  recovery"
    for task in evaluation.tasks:
        label = f"{task.task}, {task.metric}"
        yield f"{label:34s} {task.student:9.4f} {task.teacher:9.4f} {task.chance:9.4f}  {recovery_text(task)}"


def recovery_text(task: TaskScore) -> str:
    """A percentage, or why there is none."""
    if task.recovery is None:
        return "none: the teacher does no better than chance"
    doubt = " (the teacher is within two standard errors of chance)" if task.teacher_is_at_chance else ""
    return f"{task.recovery:.1%}{doubt}"


# ---------------------------------------------------------------------- side by side


def comparison_warnings(evaluations: list[Evaluation]) -> list[str]:
    """What makes the columns of a comparison unequal: teacher, text, settings, device, precision, versions."""
    first = evaluations[0].conditions
    warnings = []
    for other in (evaluation.conditions for evaluation in evaluations[1:]):
        for name in ("teacher", "data", "settings", "device", "dtype", "threads", "versions"):
            if getattr(first, name) != getattr(other, name):
                warnings.append(f"{other.student} and {first.student} were measured with different {name}")
    return warnings


def comparison_text(names: list[str], evaluations: list[Evaluation]) -> str:
    """A column per student and one for the teacher of the first; recovery of every task; warnings at the end."""
    width = max(12, *(len(name) + 2 for name in names))
    rows = [_row("", [*names, "teacher"], width), *_comparison_rows(evaluations, width)]
    labels = list(dict.fromkeys((t.task, t.metric) for e in evaluations for t in e.tasks))
    if labels:
        rows += ["", _row("recovery", names, width)]
    for label in labels:
        found = [next((t for t in e.tasks if (t.task, t.metric) == label), None) for e in evaluations]
        shown = ["-" if t is None else "chance" if t.recovery is None else f"{t.recovery:.1%}" for t in found]
        rows.append(_row(", ".join(label), shown, width))
    warnings = comparison_warnings(evaluations)
    return "\n".join([*rows, *([""] if warnings else []), *(f"warning: {warning}" for warning in warnings)])


def _comparison_rows(evaluations: list[Evaluation], width: int) -> Iterator[str]:
    language = [e.language for e in evaluations]
    if known := next((s for s in language if s is not None), None):
        yield _row(
            "perplexity",
            [*(_number(s.perplexity if s else None) for s in language), _number(known.teacher_perplexity)],
            width,
        )
        bytes_ = [
            *(_number(s.byte_perplexity if s else None) for s in language),
            _number(known.teacher_byte_perplexity),
        ]
        yield _row("perplexity per byte", bytes_, width)
        for name in ("kl", "top1_agreement", "top5_agreement"):
            yield _row(name, [_number(getattr(s, name) if s else None) for s in language], width)
    branches = [e.branches for e in evaluations]
    if any(branches):
        for use in USES[1:]:
            losses = [None if b is None else perplexity(b.loss[use]) for b in branches]
            yield _row(f"perplexity, {use} alone", [_number(x) for x in losses], width)
    points = {(p.model, p.context) for e in evaluations if e.speed for p in e.speed.points}
    for context in sorted({context for _, context in points}):
        for field, title in (
            ("prefill", "prefill tokens/s"),
            ("decode", "decode tokens/s"),
            ("cache_bytes", "cache bytes"),
        ):
            values = [_speed_of(e, "student", context, field) for e in evaluations]
            teacher = _speed_of(evaluations[0], "teacher", context, field)
            yield _row(f"{title} at {context:,}", [_number(x) for x in (*values, teacher)], width)


def _speed_of(evaluation: Evaluation, model: str, context: int, field: str) -> float | None:
    points = evaluation.speed.points if evaluation.speed else []
    return next((getattr(p, field) for p in points if (p.model, p.context) == (model, context)), None)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _row(label: str, cells: list[str], width: int) -> str:
    return f"{label:38s}" + "".join(f"{cell:>{width}s}" for cell in cells)


def comparison_json(names: list[str], evaluations: list[Evaluation]) -> dict[str, object]:
    """All evaluations by name, and the warnings."""
    students = {name: evaluation.to_json() for name, evaluation in zip(names, evaluations, strict=True)}
    return {"students": students, "warnings": comparison_warnings(evaluations)}


def distinct_names(names: list[str]) -> list[str]:
    """The names, those that recur numbered from the second on."""
    seen: dict[str, int] = {}
    numbered = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        numbered.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return numbered
