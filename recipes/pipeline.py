"""Runs a recipe end to end: plan, surgery, transfer, LoRA, merge, export, parity gate, summary."""

from __future__ import annotations

import json
import math
import platform
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.convert.card import render_card
from linearize.convert.checkpoint import check_source, load_teacher, load_tokenizer
from linearize.convert.errors import ConversionError
from linearize.convert.export import RECORD, export
from linearize.convert.plan import Plan, make_plan
from linearize.convert.size import cache_bytes
from linearize.convert.surgery import as_teacher, build_student, student_mixers
from linearize.convert.verify import verify_in_fresh_process
from linearize.distill.adapters import attach_adapters, merge_adapters, trainable_groups
from linearize.distill.data import Corpus, TokenBlocks, read_corpus, tokenize
from linearize.distill.evaluate.language import LanguageScore, score_language
from linearize.distill.progress import say
from linearize.distill.stages.lora import LoraObjective
from linearize.distill.stages.transfer import TransferObjective
from linearize.distill.trainer import LoopConfig, train
from linearize.recipes.defaults import Stages, stages_of
from linearize.recipes.python_corpus import documents, renamed
from linearize.recipes.schema import Recipe
from linearize.recipes.summary import Control, Perplexity, Sample, Summary
from linearize.recipes.teachers import Teacher, resolve_teacher
from linearize.recipes.workspace import Workspace

CONTEXTS = (1024, 32768)
PROMPT = "def read_config(path):\n"
_SAMPLE_TOKENS = 48
_PACKAGES = ("linearize", "torch", "triton", "transformers", "peft", "accelerate", "safetensors")


def run(
    recipe: Recipe, out: str | Path | None = None, resume: bool = False, force: bool = False, command: str = ""
) -> Summary:
    """Convert as the recipe says.

    Args:
        out: folder for the student; default `<teacher>-<mixer>` in the working directory.
        resume: continue a run that was stopped.
        force: replace what is in `out`, and an unfinished run.
        command: for the card.

    Raises:
        ConversionError: bad input; nothing is left behind unless training had begun.
    """
    teacher = resolve_teacher(recipe.teacher, recipe.revision)
    config = check_source(teacher.folder)
    ffn = {"ffn": recipe.ffn, "ffn_options": recipe.ffn_options}
    plan = make_plan(config.num_hidden_layers, recipe.to, recipe.keep_softmax, **ffn, **recipe.options)
    out = Path(out) if out else Path(f"{teacher.name.split('/')[-1]}-{plan.name}")
    work = Workspace(out)
    say(f"teacher: {teacher.label}")
    say(f"plan: {len(plan.converted)} of {len(plan.layers)} layers to {recipe.to}" + _kept(plan) + f" -> {out}")
    resumed = work.open(recipe, teacher.folder, resume, force)
    if resumed:
        say(f"resuming from {work.folder}")
    try:
        summary = _Conversion(recipe, teacher, config, plan, work, command).run()
    except ConversionError:
        if not resumed and not work.trained:
            work.discard()
        raise
    return summary


class _Conversion:
    """One run: the things every step needs, and the steps."""

    def __init__(
        self, recipe: Recipe, teacher: Teacher, config: Any, plan: Plan, work: Workspace, command: str
    ) -> None:
        self.recipe, self.teacher, self.plan, self.work, self.command = recipe, teacher, plan, work, command
        self.longest = getattr(config, "max_position_embeddings", None) or 1024
        self.stages: Stages = stages_of(recipe)
        self.device = recipe.device if recipe.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        on_cpu = torch.device(self.device).type == "cpu"
        name = recipe.dtype if recipe.dtype != "auto" else "float32" if on_cpu else "bfloat16"
        self.dtype: torch.dtype = getattr(torch, name)

    def run(self) -> Summary:
        recipe, work = self.recipe, self.work
        self.tokenizer = load_tokenizer(self.teacher.folder)
        with work.timed("data"):
            self._load_data()
        with work.timed("surgery"):
            model = load_teacher(self.teacher.folder, self.dtype, self.device)
            torch.manual_seed(recipe.seed)
            student = self._surgery(model, self.plan)
        surgery = self._measure("surgery", student)
        transfer = None
        if self._transfer("transfer", student):
            transfer = self._measure("transfer", student)
        self._lora("lora", student)
        final = self._measure("student", student) if self.stages.lora.tokens else transfer or surgery
        control = self._control(model)
        sample = Sample(**work.once("sample", lambda: self._sample(student)))
        state, kv = zip(*(cache_bytes(student, context) for context in CONTEXTS), strict=True)
        parameters = self._count(student)
        with work.timed("export"):
            self._export(student)
        say("parity gate, in a fresh process")
        with work.timed("gate"):
            gate = verify_in_fresh_process(work.student)
        summary = Summary(
            teacher=self.teacher.label,
            to=recipe.to,
            out=str(work.out),
            perplexity=Perplexity(
                teacher=surgery.teacher_perplexity,
                surgery=surgery.perplexity,
                transfer=None if transfer is None else transfer.perplexity,
                student=final.perplexity,
            ),
            loss={"teacher": surgery.teacher_loss, "student": final.loss},
            kl=final.kl,
            top1_agreement=final.top1_agreement,
            control=control,
            state_bytes={str(c): n for c, n in zip(CONTEXTS, state, strict=True)},
            kv_bytes={str(c): n for c, n in zip(CONTEXTS, kv, strict=True)},
            gate=gate.to_json(),
            seconds=sum(work.results["seconds"].values()),
            stage_seconds=work.results["seconds"],
            tokens=work.results.get("tokens", {}),
            data=self.corpus.source,
            context=self.heldout.length,
            heldout_tokens=surgery.tokens,
            plan=self.plan.to_config(),
            parameters=parameters,
            sample=sample,
            seed=recipe.seed,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            revision=recipe.revision,
            license=_license(self.teacher.folder),
            command=self.command,
            versions={"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
        )
        self._finish(summary)
        return summary

    # ------------------------------------------------------------------ data

    def _load_data(self) -> None:
        recipe = self.recipe
        if recipe.data is None:
            source = f"the standard library of Python {platform.python_version()}"
            self.corpus = Corpus(
                source, renamed(documents("train", seed=recipe.seed), recipe.seed), documents("heldout")
            )
        else:
            self.corpus = read_corpus(recipe.data)
        context = min(recipe.context, self.longest)
        stages = self.stages
        wanted = max(stages.transfer.tokens, stages.lora.tokens, recipe.calibration_tokens) + context
        train_ids = tokenize(self.corpus.train, self.tokenizer, wanted)
        self.train_data = TokenBlocks(train_ids, context, f"the training text ({self.corpus.source})")
        measured = min(recipe.heldout_context or 1024, self.longest)
        ids = tokenize(self.corpus.heldout, self.tokenizer)
        blocks = TokenBlocks(ids, min(measured, max(2, ids.numel())), "the held-out text")
        self.heldout = blocks.spread(recipe.heldout_tokens)

    # ------------------------------------------------------------------ steps

    def _surgery(self, model: PreTrainedModel, plan: Plan) -> PreTrainedModel:
        count = self.recipe.calibration_tokens // self.train_data.length
        sample = self.train_data.batch(0, count, self.recipe.seed) if count else None
        return build_student(model, plan, calibration=sample)

    def _transfer(self, name: str, student: PreTrainedModel) -> bool:
        stage = self.stages.transfer
        if stage.adapter_learning_rate is not None:
            attach_adapters(student, self.stages.lora.rank, self.stages.lora.alpha)
        groups = trainable_groups(student, stage.learning_rate, stage.adapter_learning_rate)
        if not groups or not stage.tokens:
            return False
        self._train(name, TransferObjective(student), groups, stage.tokens, stage.batch_size, self.recipe.seed)
        return True

    def _lora(self, name: str, student: PreTrainedModel) -> None:
        stage, seed = self.stages.lora, self.recipe.seed
        torch.manual_seed(seed + 1)
        attach_adapters(student, stage.rank, stage.alpha)
        groups = trainable_groups(student, stage.new_learning_rate, stage.learning_rate)
        if groups and stage.tokens:
            objective = LoraObjective(student, stage.ce_weight, stage.kl_weight)
            self._train(name, objective, groups, stage.tokens, stage.batch_size, seed + 1)

    def _train(
        self, name: str, objective: torch.nn.Module, groups: list[dict], tokens: int, batch_size: int | None, seed: int
    ) -> None:
        assert batch_size is not None, "stages_of decides it"
        steps = max(1, math.ceil(tokens / (batch_size * self.train_data.length)))
        config = LoopConfig(steps=steps, batch_size=batch_size, seed=seed)
        with self.work.timed(name):
            log = train(name, objective, groups, self.train_data, config, self.work.state(name))
        self.work.once(f"losses.{name}", lambda: log.losses)
        self.work.results.setdefault("tokens", {})[name] = log.tokens
        rate = log.tokens / max(log.seconds, 1e-9)
        say(f"{name}: {log.tokens:,} tokens, loss {log.losses[0]:.4f} -> {log.losses[-1]:.4f}, {rate:,.0f} tokens/s")

    def _measure(self, name: str, student: PreTrainedModel) -> LanguageScore:
        with self.work.timed("measure"):
            score = LanguageScore(
                **self.work.once(f"score.{name}", lambda: asdict(score_language(student, self.heldout)))
            )
        say(f"{name}: perplexity {score.perplexity:.3f} (teacher {score.teacher_perplexity:.3f}), KL {score.kl:.4f}")
        return score

    def _control(self, model: PreTrainedModel) -> Control | None:
        """The window alone, given the same stages on the same tokens."""
        recipe = self.recipe
        if not recipe.control or recipe.to in ("swa", "softmax") or not self.stages.lora.tokens:
            return None
        window = recipe.options.get("window") or 64
        plan = make_plan(len(self.plan.layers), "swa", recipe.keep_softmax, window=window)
        torch.manual_seed(recipe.seed)
        student = build_student(model, plan)
        self._transfer("control_transfer", student)
        self._lora("control", student)
        score = self._measure("control", student)
        return Control(
            to=f"swa (window {window})", perplexity=score.perplexity, kl=score.kl, top1_agreement=score.top1_agreement
        )

    @torch.no_grad()
    def _sample(self, student: PreTrainedModel) -> dict[str, str]:
        if self.recipe.data is None:
            ids = self.tokenizer(PROMPT, return_tensors="pt").input_ids
        else:
            ids = self.heldout.blocks[:1, : min(32, self.heldout.length)]
        student.eval()
        texts = {"prompt": self.tokenizer.decode(ids[0], skip_special_tokens=True)}
        with as_teacher(student):
            texts["teacher"] = self._continue(student, ids)
        texts["student"] = self._continue(student, ids)
        return texts

    def _continue(self, model: PreTrainedModel, ids: torch.Tensor) -> str:
        """Greedy, without a cache: the teacher inside the student has none."""
        full = ids.to(model.device)
        for _ in range(_SAMPLE_TOKENS):
            logits = model(input_ids=full, use_cache=False).logits
            full = torch.cat([full, logits[:, -1:].argmax(-1)], 1)
        return self.tokenizer.decode(full[0, ids.shape[1] :], skip_special_tokens=True)

    def _count(self, student: PreTrainedModel) -> dict[str, int]:
        new = sum(p.numel() for mixer in student_mixers(student) for p in mixer.new_parameters().values())
        adapters = sum(p.numel() for name, p in student.named_parameters() if "lora_" in name)
        total = sum(p.numel() for p in student.parameters()) - adapters
        return {"total": total, "new": new, "trained": new + adapters}

    def _export(self, student: PreTrainedModel) -> None:
        merge_adapters(student)
        shutil.rmtree(self.work.student, ignore_errors=True)
        record = {"recipe": self.recipe.model_dump(mode="json"), "command": self.command}
        export(student, self.teacher.folder, self.work.student, record)

    def _finish(self, summary: Summary) -> None:
        record = summary.model_dump(mode="json")
        file = self.work.student / RECORD
        merged = {**json.loads(file.read_text()), "summary": record, "losses": self._losses()}
        file.write_text(json.dumps(merged, indent=1))
        card = {**record, "teacher": self.teacher.name}
        (self.work.student / "README.md").write_text(render_card(card))
        if summary.gate["passed"]:
            self.work.finish()

    def _losses(self) -> dict[str, list[float]]:
        results = self.work.results
        return {key.removeprefix("losses."): value for key, value in results.items() if key.startswith("losses.")}


def _kept(plan: Plan) -> str:
    return f", layers {', '.join(map(str, plan.kept))} keep softmax" if plan.kept else ""


def _license(folder: Path) -> str | None:
    """The licence in the front matter of the teacher's card."""
    card = folder / "README.md"
    if card.is_file():
        for line in card.read_text(encoding="utf-8").splitlines()[1:40]:
            if line.startswith("license:"):
                return line.split(":", 1)[1].strip()
            if line == "---":
                break
    return None


def _version(package: str) -> str:
    try:
        return version(package)
    except ImportError:
        return "not installed"
