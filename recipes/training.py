"""Runs the stages of a recipe on one student, one after another, and keeps what each did."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.convert.surgery import new_parameters
from linearize.distill.data import Documents, TokenBlocks, Tokens, cached_tokens, mixture, read_tokens, tokenize
from linearize.distill.evaluate.language import LanguageScore, score_language
from linearize.distill.memory import peak_memory
from linearize.distill.parameters import describe_manifest, manifest
from linearize.distill.progress import say
from linearize.distill.reading import Corpus, Source, shares_of
from linearize.distill.reference import Reference
from linearize.distill.stages import Stage, Workbench
from linearize.distill.trainer import LoopConfig, train
from linearize.recipes.corpus import open_corpus
from linearize.recipes.schema import Recipe
from linearize.recipes.summary import StageScore
from linearize.recipes.workspace import Workspace

_MEASURED = 1024
"""Tokens per measured sequence unless the recipe says, or the teacher reads fewer."""

_DOCUMENTS = 20_000
"""Of a stream, as many are made into examples."""


class StageData:
    """What every stage reads, and the held-out text. Stages of the same source and length share one order.

    Args:
        longest: tokens that the teacher can read.
    """

    def __init__(self, recipe: Recipe, stages: list[Stage], tokenizer: Any, longest: int) -> None:
        self.recipe, self.tokenizer, self.longest = recipe, tokenizer, longest
        self._corpora: dict[str | None, Corpus] = {}
        self._blocks: dict[tuple[str, int], TokenBlocks] = {}
        self.corpus = open_corpus(recipe.data, recipe.seed, streaming=recipe.streaming)
        length = min(recipe.context, longest)
        first = repr(recipe.data), length
        wanted: dict[tuple[str, int], tuple[Source, int]] = {first: (recipe.data, recipe.calibration_tokens)}
        for stage in (stage for stage in stages if not stage.examples):
            source, before = wanted.get(self._key(stage), (stage.data or recipe.data, 0))
            wanted[self._key(stage)] = source, max(before, stage.tokens)
            if recipe.documents != "joined" and stage.tokens:
                stage.check_documents()
        for key, (source, tokens) in wanted.items():
            self._blocks[key] = self._cut(source, tokens + key[1], key[1], recipe.documents)
        self.calibration = self._blocks[first]
        if recipe.documents != "joined":
            self.calibration = self._cut(recipe.data, recipe.calibration_tokens + length, length, "joined")
        self.heldout = self._heldout(min(recipe.heldout_context or _MEASURED, longest))
        self._examples = {s.label: self._load(s, i) for i, s in enumerate(stages) if s.examples and s.tokens}

    def of(self, stage: Stage) -> TokenBlocks:
        """The stage's training examples."""
        return self._examples[stage.label] if stage.examples else self._blocks[self._key(stage)]

    def _length(self, stage: Stage) -> int:
        length = stage.context or self.recipe.context
        length = min(length, max(self.recipe.context, stage.tokens))  # one sequence is at most all of the stage
        return length if stage.beyond_teacher else min(length, self.longest)

    def _key(self, stage: Stage) -> tuple[str, int]:
        return repr(stage.data or self.recipe.data), self._length(stage)

    def _cut(self, source: Source, tokens: int, length: int, documents: Documents) -> TokenBlocks:
        """At least `tokens` tokens of training text, if there are as many."""
        parts = []
        for name, share in _shares(source).items():
            corpus = self._corpus(name)
            read = self._read(corpus, math.ceil(tokens * share) + (length if share < 1 else 0))
            parts.append((read.blocks(length, documents, f"the training text ({corpus.source})"), share))
        return parts[0][0] if len(parts) == 1 else mixture(parts, math.ceil(tokens / length))

    def _read(self, corpus: Corpus, limit: int) -> Tokens:
        if not self.recipe.token_cache:
            return read_tokens(corpus.train, self.tokenizer, limit)
        return cached_tokens(corpus, self.tokenizer, limit)

    def _heldout(self, length: int) -> TokenBlocks:
        """Held-out text of every source, by its share."""
        chosen = []
        for name, share in _shares(self.recipe.data).items():
            ids = tokenize(self._corpus(name).heldout, self.tokenizer)
            blocks = TokenBlocks(ids, min(length, max(2, ids.numel())), "the held-out text")
            chosen.append(blocks.spread(math.ceil(self.recipe.heldout_tokens * share)))
        length = min(blocks.length for blocks in chosen)
        return TokenBlocks(torch.cat([blocks.blocks[:, :length].flatten() for blocks in chosen]), length)

    def _corpus(self, source: str | None) -> Corpus:
        if source == self.recipe.data:
            return self.corpus
        if source not in self._corpora:
            self._corpora[source] = open_corpus(source, self.recipe.seed, streaming=self.recipe.streaming)
        return self._corpora[source]

    def _load(self, stage: Stage, index: int) -> TokenBlocks:
        length = self._length(stage)
        count = max(1, math.ceil(stage.tokens / length))
        documents = list(islice(self.corpus.train, _DOCUMENTS if self.recipe.streaming else None))
        return stage.load_examples(documents, self.tokenizer, length, count, self.recipe.seed + index)


def _shares(source: Source) -> dict[Any, float]:
    return shares_of(source) if isinstance(source, dict) else {source: 1.0}


@dataclass
class Trained:
    """What became of a student.

    Attributes:
        score: of the student at the end; None where no stage ran.
        sizes: numbers in every tensor that trained, by name.
        manifest: stage -> what trained in it.
    """

    stages: list[StageScore]
    score: LanguageScore | None
    sizes: dict[str, int]
    manifest: dict[str, list[dict[str, Any]]]


class Training:
    """Trains one student by the recipe's stages.

    Args:
        teacher: the model that the student shares its tensors with.
        prefix: before every stage's name in files and messages.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        recipe: Recipe,
        data: StageData,
        work: Workspace,
        prefix: str = "",
    ) -> None:
        self.student, self.teacher, self.recipe = student, teacher, recipe
        self.data, self.work, self.prefix = data, work, prefix
        self.new = frozenset(new_parameters(student))
        self.result = Trained([], None, {}, {})

    def run(self, stages: list[Stage], measure: bool = True) -> Trained:
        """Train stage after stage; measures after each if asked to, else after the last."""
        for index, stage in enumerate(stages):
            if not stage.tokens:
                continue
            if index:
                torch.manual_seed(self.recipe.seed + index)
            ran = self._stage(stage, self.recipe.seed + index)
            if ran is not None and (measure or index + 1 == len(stages)):
                self.result.score = score = self.measure(f"{self.prefix}{stage.label}")
                ran.note(score)
        return self.result

    def measure(self, name: str) -> LanguageScore:
        """The student on the held-out text."""
        reference = Reference(self.student, self.teacher)
        beside: dict[str, Any] = {} if reference.zero_copy else {"teacher": self.teacher}
        with self.work.timed("measure"):
            score = LanguageScore(
                **self.work.once(
                    f"score.{name}", lambda: asdict(score_language(self.student, self.data.heldout, **beside))
                )
            )
        say(f"{name}: perplexity {score.perplexity:.3f} (teacher {score.teacher_perplexity:.3f}), KL {score.kl:.4f}")
        return score

    def _stage(self, stage: Stage, seed: int) -> StageScore | None:
        assert stage.batch_size is not None, "stages_of decides it"
        name, data, results = f"{self.prefix}{stage.label}", self.data.of(stage), self.work.results
        per_step = stage.batch_size * data.length
        steps = max(1, math.ceil(stage.tokens / per_step))
        bench = Workbench(
            self.student, self.teacher, self.new, data, steps, stage.batch_size, seed, self.work.state(name)
        )
        losses: list[float] = []
        tokens = 0
        with self.work.timed(name), peak_memory(self.student.device) as peak:
            for number, part in enumerate(stage.prepare(bench)):
                if not part.groups:
                    continue
                self._note(stage, name, part.groups)
                config = LoopConfig(
                    steps=max(1, math.ceil(stage.tokens * part.share / per_step)),
                    batch_size=stage.batch_size,
                    seed=seed,
                    schedule=stage.schedule,
                    warmup=stage.warmup,
                    final_rate=stage.final_rate,
                    clip=stage.clip,
                    accumulation=self.recipe.accumulation,
                    gradient_checkpointing=self.recipe.gradient_checkpointing,
                    compile=self.recipe.compile,
                    report_to=tuple(self.recipe.report_to),
                )
                state = self.work.state(name if part.share == 1 else f"{name}.{number}")
                log = train(name, part.objective, part.groups, data, config, state)
                losses += log.losses
                tokens += log.tokens
        if not losses:
            say(f"{name}: nothing to train")
            return None
        self.work.once(f"losses.{name}", lambda: losses)
        results.setdefault("tokens", {})[name] = tokens
        peaks = results.setdefault("peak_memory", {})
        peaks[name] = max(peaks.get(name, 0), peak.bytes)
        rate = tokens / max(results["seconds"][name], 1e-9)
        say(f"{name}: {tokens:,} tokens, loss {losses[0]:.4f} -> {losses[-1]:.4f}, {rate:,.0f} tokens/s")
        scored = StageScore(
            name=stage.label,
            kind=stage.kind,
            tokens=tokens,
            loss_first=losses[0],
            loss_last=losses[-1],
            seconds=results["seconds"][name],
            peak_memory=peaks[name],
        )
        self.result.stages.append(scored)
        return scored

    def _note(self, stage: Stage, name: str, groups: list[dict[str, Any]]) -> None:
        """Print and keep what trains."""
        say(f"{name} trains {describe_manifest(groups)}")
        self.result.manifest[stage.label] = manifest(groups)
        self.result.sizes |= {key: p.numel() for group in groups for key, p in group["params"].items()}
        self.work.write(f"{name}.manifest.json", self.result.manifest[stage.label])
