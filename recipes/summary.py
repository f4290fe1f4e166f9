"""What a conversion reports: a typed result, its JSON and its page of text."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from linearize.distill.evaluate.language import LanguageScore


class Perplexity(BaseModel):
    """On held-out text, at each point of the conversion; None for a stage that did not run."""

    teacher: float
    surgery: float | None
    transfer: float | None
    student: float


class StageScore(BaseModel):
    """One stage: its losses, and the student on held-out text after it."""

    name: str
    kind: str
    tokens: int
    loss_first: float
    loss_last: float
    perplexity: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    seconds: float
    peak_memory: int
    """Bytes, see `peak_memory`."""

    def note(self, score: LanguageScore) -> None:
        """Keep what was measured after the stage."""
        self.perplexity, self.kl, self.top1_agreement = score.perplexity, score.kl, score.top1_agreement


class Control(BaseModel):
    """The window alone, trained on equal tokens."""

    to: str
    perplexity: float
    kl: float
    top1_agreement: float


class Sample(BaseModel):
    """Greedy continuations of one prompt."""

    prompt: str
    teacher: str
    student: str


class Summary(BaseModel):
    """The outcome of a conversion. `model_dump(mode="json")` is what `--json` prints."""

    model_config = ConfigDict(extra="forbid")

    teacher: str
    to: str
    out: str
    perplexity: Perplexity
    loss: dict[str, float]
    """Held-out nats per token of teacher and student."""
    kl: float
    top1_agreement: float
    control: Control | None
    stages: list[StageScore]
    state_bytes: dict[str, int]
    """Context in tokens -> bytes one sequence holds."""
    kv_bytes: dict[str, int]
    gate: dict[str, Any]
    seconds: float
    stage_seconds: dict[str, float]
    tokens: dict[str, int]
    data: str
    context: int
    heldout_tokens: int
    plan: list[dict[str, Any]]
    parameters: dict[str, int]
    sample: Sample
    seed: int
    device: str
    dtype: str
    revision: str | None
    license: str | None
    command: str
    versions: dict[str, str]

    def to_text(self) -> str:
        """The page a person reads at the end."""
        p = self.perplexity
        rows: list[tuple[str, float | None]] = [("teacher", p.teacher), ("after surgery", p.surgery)]
        rows += [(f"after {stage.name}", stage.perplexity) for stage in self.stages[:-1] if stage.perplexity]
        rows.append(("student", p.student))
        if self.control is not None:
            rows.append((f"control: {self.control.to} alone", self.control.perplexity))
        lines = [
            f"{self.teacher} -> {self.to}",
            "",
            f"perplexity on {self.heldout_tokens:,} held-out tokens of {self.data}, {self.context} at a time",
            *(f"  {name:24s}{value:9.3f}   {value / p.teacher:6.3f} x" for name, value in rows if value is not None),
            "",
            f"KL from the teacher      {self.kl:9.4f} nats per token",
            f"same first choice        {self.top1_agreement:9.1%}",
            "",
            "bytes one sequence holds      student      teacher's KV cache",
            *(
                f"  at {int(c):>6,} tokens    {self.state_bytes[c]:>14,}      {self.kv_bytes[c]:>14,}   "
                f"{self.kv_bytes[c] / max(1, self.state_bytes[c]):.1f} x"
                for c in self.state_bytes
            ),
            "",
            f"parity gate: {'passed' if self.gate['passed'] else 'FAILED'} ({len(self.gate['checks'])} checks)",
            *(
                f"  FAILED {c['name']}: {c['value']} > {c['limit']} {c['detail']}"
                for c in self.gate["checks"]
                if not c["passed"]
            ),
            "",
            f"prompt   {self.sample.prompt!r}",
            f"teacher  {self.sample.teacher!r}",
            f"student  {self.sample.student!r}",
            "",
            f"trained on {sum(self.tokens.values()):,} tokens; {self.seconds:.0f} s in all "
            f"({', '.join(f'{name} {seconds:.0f} s' for name, seconds in self.stage_seconds.items())})",
            f"written to {self.out}",
        ]
        if not self.stages:
            lines.append("note: this student was not trained; it is surgery alone")
        return "\n".join(lines)
