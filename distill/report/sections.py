"""What a report has to say, question by question."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from linearize.convert.card_sections import Figure, Missing, Section, Table
from linearize.distill.evaluate.suite import Evaluation
from linearize.distill.report.cost_figures import memory_curves, speed_curves
from linearize.distill.report.measurements import Measurements
from linearize.distill.report.mechanism_figures import branch_shares, plan_strip, state_use
from linearize.distill.report.quality_figures import needle_map, position_curves, recall_curves
from linearize.distill.report.tables import branch_table, language_table, recovery_table, retrieval_table
from linearize.distill.report.training_figures import layer_errors, loss_curves

Made = Figure | Table | None

_CONVERT = "convert TEACHER"
_EVALUATE = "linearize eval DIR"
_RETRIEVE = "linearize eval DIR --retrieval FILE.jsonl"


def sections(measured: Measurements) -> list[Section]:
    """All sections, also those for which nothing was measured."""
    ask = _Asker(measured.evaluation)
    return [
        _section("layers", "Layers", "What replaced what, layer by layer.", [
            _or_missing(plan_strip(measured), "plan of the layers", _CONVERT),
        ]),
        _section(
            "recovery", "Recovery",
            "The share of the teacher's distance from guessing that the student kept: 100 % is all of it, "
            "0 % is guessing.",
            [
                ask("language", "recovery by task", recovery_table),
                ask("language", "held-out perplexity and KL", language_table),
            ],
        ),
        _section(
            "length", "Length and recall",
            "A model that profits from a longer context has a curve that falls to the right; one that recalls gives back "
            "exactly what was said long before.",
            [
                ask("positions", "perplexity by position", position_curves),
                ask("needle", "needle heat map", needle_map),
                ask("mqar", "recall of pairs", recall_curves),
                ask("retrieval", "retrieval", retrieval_table),
            ],
        ),
        _section(
            "branches", "Branches and state",
            "How much of the work the recurrence does beside the softmax window, and how much of its state it uses.",
            [
                ask("branches", "use of the branches", branch_shares),
                ask("branches", "perplexity by branch", branch_table),
                ask("state", "use of the state", state_use),
            ],
        ),
        _section(
            "memory", "Speed and memory",
            "The teacher's cache grows with every token; a state does not. Both models ran under the same conditions.",
            [
                ask("speed", "speed of generation", lambda evaluation: speed_curves(evaluation, "decode")),
                ask("speed", "speed of reading", lambda evaluation: speed_curves(evaluation, "prefill")),
                _or_missing(memory_curves(measured), "memory against context", _CONVERT),
            ],
        ),
        _section(
            "training", "Training", "Losses are what each stage minimises; stages cannot be compared by them.",
            [
                _or_missing(loss_curves(measured), "training loss by stage", _CONVERT),
                _or_missing(layer_errors(measured), "distance from the teacher's attention by layer", _CONVERT),
            ],
        ),
    ]  # fmt: skip


class _Asker:
    """Asks makers of figures and tables for what an evaluation holds."""

    def __init__(self, evaluation: Evaluation | None) -> None:
        self.evaluation = evaluation

    def __call__(
        self, question: str, title: str, make: Callable[[Evaluation], Made]
    ) -> Figure | Table | Missing | None:
        """What `make` makes; what is missing; or None where the question was asked and had no answer."""
        made = make(self.evaluation) if self.evaluation else None
        asked = self.evaluation is not None and question in self.evaluation.seconds
        command = _RETRIEVE if question == "retrieval" else _EVALUATE
        return made or (None if asked else Missing(title, command))


def _or_missing(made: Figure | None, title: str, command: str) -> Figure | Missing:
    return made or Missing(title, command)


def _section(key: str, title: str, text: str, parts: Sequence[Figure | Table | Missing | None]) -> Section:
    return Section(
        key, title, text,
        figures=[part for part in parts if isinstance(part, Figure)],
        tables=[part for part in parts if isinstance(part, Table)],
        missing=[part for part in parts if isinstance(part, Missing)],
    )  # fmt: skip
