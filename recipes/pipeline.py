"""Runs a recipe end to end: plan, surgery, stages, merge, export, parity gate, summary."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from linearize.convert.checkpoint import check_source, load_teacher, load_tokenizer
from linearize.convert.errors import ConversionError
from linearize.convert.export import RECORD, export
from linearize.convert.plan import Plan, make_plan
from linearize.convert.size import cache_bytes
from linearize.convert.surgery import build_student, new_parameters
from linearize.convert.verify import GateReport, verify_in_fresh_process
from linearize.distill import processes
from linearize.distill.adapters import checkpoint_name, merge_adapters
from linearize.distill.device import choose_device
from linearize.distill.evaluate.language import LanguageScore
from linearize.distill.layer_errors import layer_errors
from linearize.distill.loss_log import CURVES, EVENTS, check_trackers
from linearize.distill.progress import say
from linearize.distill.reference import Reference
from linearize.distill.report import write_report
from linearize.distill.stages import Anneal, Stage
from linearize.recipes.defaults import stages_of
from linearize.recipes.schema import Recipe
from linearize.recipes.summary import Control, Perplexity, Sample, Summary
from linearize.recipes.teachers import Teacher, resolve_teacher
from linearize.recipes.training import StageData, Trained, Training
from linearize.recipes.workspace import Workspace

CONTEXTS = (1024, 32768)
PROMPT = "def read_config(path):\n"
_SAMPLE_TOKENS = 48
COMPARED = 2
"""Held-out sequences on which layers are compared with the teacher's."""

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
    processes.start(cpu=recipe.device == "cpu")
    teacher = resolve_teacher(recipe.teacher, recipe.revision)
    config = check_source(teacher.folder)
    plan = make_plan(
        config.num_hidden_layers,
        recipe.to,
        recipe.keep_softmax,
        ffn=recipe.ffn,
        ffn_options=recipe.ffn_options,
        **recipe.options,
    )
    out = Path(out) if out else Path(f"{teacher.name.split('/')[-1]}-{plan.name}")
    _check_stages(recipe, config, plan)
    work = Workspace(out)
    say(f"teacher: {teacher.label}")
    say(f"plan: {len(plan.converted)} of {len(plan.layers)} layers to {recipe.to}" + _kept(plan) + f" -> {out}")
    resumed = work.open(recipe, teacher.folder, resume, force)
    if resumed:
        say(f"resuming from {work.folder}")
    try:
        from linearize.recipes.streamed import StreamedConversion, streams  # it is built on this module

        kind = StreamedConversion if streams(stages_of(recipe)) else Conversion
        summary = kind(recipe, teacher, config, plan, work, command).run()
    except ConversionError:
        if not resumed and not work.trained:
            work.discard()
        raise
    return summary


@dataclass(frozen=True)
class Outcome:
    """What a conversion made, before it is summed up.

    Attributes:
        student: its configuration and shapes count; a streamed one has no numbers.
        surgery: the score before training; None where it was not measured.
    """

    student: PreTrainedModel
    surgery: LanguageScore | None
    final: LanguageScore
    trained: Trained
    control: Control | None
    sample: Sample
    parameters: dict[str, int]
    gate: GateReport


class Conversion:
    """One run: the things every step needs, and the steps."""

    def __init__(
        self, recipe: Recipe, teacher: Teacher, config: Any, plan: Plan, work: Workspace, command: str
    ) -> None:
        self.recipe, self.teacher, self.plan, self.work, self.command = recipe, teacher, plan, work, command
        self.longest = getattr(config, "max_position_embeddings", None) or 1024
        self.stages = stages_of(recipe)
        self.device = choose_device(recipe.device)
        on_cpu = torch.device(self.device).type == "cpu"
        name = recipe.dtype if recipe.dtype != "auto" else "float32" if on_cpu else "bfloat16"
        self.dtype: torch.dtype = getattr(torch, name)

    def run(self) -> Summary:
        self.tokenizer = load_tokenizer(self.teacher.folder)
        with self.work.timed("data"):
            self.data = StageData(self.recipe, self.stages, self.tokenizer, self.longest)
        outcome = self.convert()
        summary = self._summary(outcome)
        processes.on_main(lambda: self._finish(summary, outcome.trained))
        return summary

    def convert(self) -> Outcome:
        """Surgery, training, export to the workspace, gate."""
        recipe, work = self.recipe, self.work
        with work.timed("surgery"):
            model = load_teacher(self.teacher.folder, self.dtype, self.device)
            torch.manual_seed(recipe.seed)
            student = self._surgery(model, self.plan)
        new = sum(p.numel() for p in new_parameters(student).values())
        training = Training(student, model, recipe, self.data, work)
        surgery = training.measure("surgery")
        self._compare_layers("surgery", student, model)
        trained = training.run(self.stages)
        if trained.stages:
            self._compare_layers("student", student, model)
        control = self._control(model)
        return self.outcome(student, model, new, trained, surgery, trained.score or surgery, control)

    def outcome(
        self,
        student: PreTrainedModel,
        model: PreTrainedModel,
        new: int,
        trained: Trained,
        surgery: LanguageScore | None,
        final: LanguageScore,
        control: Control | None,
    ) -> Outcome:
        """A student that is trained and whole: a sample of it, export to the workspace, gate."""
        work = self.work
        sample = Sample(**work.once("sample", lambda: self._sample(Reference(student, model))))
        parameters = count_parameters(student, new, trained)
        with work.timed("export"):
            processes.on_main(lambda: self._export(student, trained))
        say("parity gate, in a fresh process")
        with work.timed("gate"):
            gate = processes.on_main(lambda: verify_in_fresh_process(work.student))
        return Outcome(student, surgery, final, trained, control, sample, parameters, gate)

    def _summary(self, outcome: Outcome) -> Summary:
        recipe, work, trained, final = self.recipe, self.work, outcome.trained, outcome.final
        state, kv = zip(*(cache_bytes(outcome.student, context) for context in CONTEXTS), strict=True)
        return Summary(
            teacher=self.teacher.label,
            to=recipe.to,
            out=str(work.out),
            perplexity=Perplexity(
                teacher=final.teacher_perplexity,
                surgery=outcome.surgery.perplexity if outcome.surgery else None,
                transfer=next((stage.perplexity for stage in trained.stages if stage.kind == "transfer"), None),
                student=final.perplexity,
            ),
            loss={"teacher": final.teacher_loss, "student": final.loss},
            kl=final.kl,
            top1_agreement=final.top1_agreement,
            control=outcome.control,
            stages=trained.stages,
            state_bytes={str(c): n for c, n in zip(CONTEXTS, state, strict=True)},
            kv_bytes={str(c): n for c, n in zip(CONTEXTS, kv, strict=True)},
            gate=outcome.gate.to_json(),
            seconds=sum(work.results["seconds"].values()),
            stage_seconds=work.results["seconds"],
            tokens=work.results.get("tokens", {}),
            data=self.data.corpus.source,
            context=self.data.heldout.length,
            heldout_tokens=final.tokens,
            plan=outcome.student.config.linearize["layers"],
            parameters=outcome.parameters,
            sample=outcome.sample,
            seed=recipe.seed,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            revision=recipe.revision,
            license=_license(self.teacher.folder),
            command=self.command,
            versions={"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
        )

    def _surgery(self, model: PreTrainedModel, plan: Plan) -> PreTrainedModel:
        data = self.data.calibration
        count = self.recipe.calibration_tokens // data.length
        sample = data.batch(0, count, self.recipe.seed) if count else None
        return build_student(model, plan, calibration=sample)

    def _compare_layers(self, moment: str, student: PreTrainedModel, teacher: PreTrainedModel) -> None:
        """Keep every layer's distance from the teacher's attention."""
        ids = self.data.heldout.blocks[:COMPARED]
        with self.work.timed("measure"):
            self.work.once(f"layer_errors.{moment}", lambda: layer_errors(Reference(student, teacher), ids))

    def _control(self, model: PreTrainedModel) -> Control | None:
        """The window alone, given the same stages on the same tokens."""
        recipe = self.recipe
        if not recipe.control or recipe.to in ("swa", "softmax") or not any(stage.tokens for stage in self.stages):
            return None
        window = recipe.options.get("window") or 64
        plan = make_plan(len(self.plan.layers), "swa", recipe.keep_softmax, window=window)
        torch.manual_seed(recipe.seed)
        student = build_student(model, plan)
        training = Training(student, model, recipe, self.data, self.work, "control_")
        score = training.run([for_window(stage, window) for stage in self.stages], measure=False).score
        if score is None:
            return None
        return Control(
            to=f"swa (window {window})", perplexity=score.perplexity, kl=score.kl, top1_agreement=score.top1_agreement
        )

    @torch.no_grad()
    def _sample(self, reference: Reference) -> dict[str, str]:
        if self.recipe.data is None:
            ids = self.tokenizer(PROMPT, return_tensors="pt").input_ids
        else:
            ids = self.data.heldout.blocks[:1, : min(32, self.data.heldout.length)]
        student = reference.student.eval()
        texts = {"prompt": self.tokenizer.decode(ids[0], skip_special_tokens=True)}
        with reference.model() as teacher:
            texts["teacher"] = self._continue(teacher, ids)
        texts["student"] = self._continue(student, ids)
        return texts

    def _continue(self, model: PreTrainedModel, ids: torch.Tensor) -> str:
        """Greedy, without a cache: the teacher inside the student has none."""
        full = ids.to(model.device)
        for _ in range(_SAMPLE_TOKENS):
            logits = model(input_ids=full, use_cache=False).logits
            full = torch.cat([full, logits[:, -1:].argmax(-1)], 1)
        return self.tokenizer.decode(full[0, ids.shape[1] :], skip_special_tokens=True)

    def _export(self, student: PreTrainedModel, trained: Trained) -> None:
        merge_adapters(student)
        shutil.rmtree(self.work.student, ignore_errors=True)
        export(student, self.teacher.folder, self.work.student, self.record(trained))

    def record(self, trained: Trained) -> dict[str, Any]:
        """What stands in the student's record beside the ledger."""
        names = sorted({checkpoint_name(name) for name in trained.sizes})
        return {"recipe": self.recipe.model_dump(mode="json"), "command": self.command, "trained": names}

    def _finish(self, summary: Summary, trained: Trained) -> None:
        record = summary.model_dump(mode="json")
        file = self.work.student / RECORD
        merged = {**json.loads(file.read_text()), "teacher": self.teacher.name, "summary": record}
        merged |= {"losses": self._kept("losses."), "layer_errors": self._kept("layer_errors.")}
        merged["manifest"] = trained.manifest
        file.write_text(json.dumps(merged, indent=1))
        if (curves := self.work.folder / CURVES).is_file():
            shutil.copyfile(curves, self.work.student / CURVES)
        if (events := self.work.folder / EVENTS).is_dir():
            shutil.copytree(events, self.work.student / EVENTS, dirs_exist_ok=True)
        write_report(self.work.student)
        if summary.gate["passed"]:
            self.work.finish()

    def _kept(self, prefix: str) -> dict[str, list[Any]]:
        """Results of the run whose names begin with `prefix`, without it."""
        results = self.work.results
        return {key.removeprefix(prefix): value for key, value in results.items() if key.startswith(prefix)}


def _check_stages(recipe: Recipe, config: Any, plan: Plan) -> None:
    """Let every stage look at a student without tensors."""
    check_trackers(tuple(recipe.report_to))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    student = build_student(model, plan)
    for stage in stages_of(recipe):
        stage.check(student)


def for_window(stage: Stage, window: int) -> Stage:
    """The stage for a student that is a window alone: what anneals other options leaves it as it is."""
    if isinstance(stage, Anneal) and stage.option != "window":
        return stage.model_copy(update={"option": "window", "values": [window] * len(stage.values)})
    return stage


def count_parameters(student: PreTrainedModel, new: int, trained: Trained) -> dict[str, int]:
    """Numbers in all tensors, in those the teacher lacks, and in those that trained."""
    adapters = sum(p.numel() for name, p in student.named_parameters() if "lora_" in name)
    total = sum(p.numel() for p in student.parameters()) - adapters
    return {"total": total, "new": new, "trained": sum(trained.sizes.values())}


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
