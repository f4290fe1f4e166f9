"""Conversions whose transfer is streamed: the model is never whole in memory, unless later stages need it."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from linearize.convert.checkpoint import load_teacher, read_tensor
from linearize.convert.errors import ConversionError
from linearize.convert.export import export
from linearize.convert.layer_stream import LayerStream, StreamedTensors
from linearize.convert.surgery import build_student, new_parameters
from linearize.convert.verify import verify_in_fresh_process
from linearize.distill import processes
from linearize.distill.evaluate.language import LanguageScore
from linearize.distill.layer_errors import layer_errors_streamed
from linearize.distill.memory import peak_memory
from linearize.distill.progress import say
from linearize.distill.stages import Stage, Transfer
from linearize.distill.streaming import StreamedLayers, score_streamed, stream_transfer
from linearize.recipes.pipeline import COMPARED, Conversion, Outcome, count_parameters
from linearize.recipes.summary import Sample, StageScore
from linearize.recipes.training import Trained, Training

_NOT_GENERATED = "(not generated: the model was streamed)"


def streams(stages: list[Stage]) -> bool:
    """Whether the conversion begins with a streamed transfer.

    Raises:
        ConversionError: a later stage is to be streamed.
    """
    asked = [isinstance(stage, Transfer) and stage.stream for stage in stages]
    if any(asked[1:]):
        raise ConversionError(f"{stages[asked.index(True, 1)].label}: only the first stage can have stream = true")
    return bool(asked) and asked[0]


class StreamedConversion(Conversion):
    """A conversion that begins with a streamed transfer. Only one process can run it."""

    def convert(self) -> Outcome:
        if processes.count() > 1:
            raise ConversionError("stream = true runs in one process; start it without a launcher")
        transfer, later = self.stages[0], [stage for stage in self.stages[1:] if stage.tokens]
        assert isinstance(transfer, Transfer)
        self.source = LayerStream(self.teacher.folder, self.dtype, self.device)
        with peak_memory(torch.device(self.device)) as peak:
            layers, seconds = self._stream(transfer)
        trained = self._trained(transfer, layers, seconds, peak.bytes)
        if later:
            return self._whole(trained, layers, later)
        return self._streamed(trained, layers)

    def _stream(self, transfer: Transfer) -> tuple[StreamedLayers, float]:
        name, began = transfer.label, time.perf_counter()
        with self.work.timed(name):
            layers = stream_transfer(
                self.source,
                self.plan,
                self.data.of(transfer),
                transfer,
                self.work.folder / "stream",
                min(self.recipe.calibration_tokens // self.data.of(transfer).length, len(self.data.of(transfer))),
                self.recipe.seed,
            )
        self.work.results.setdefault("tokens", {})[name] = layers.tokens
        return layers, time.perf_counter() - began

    def _trained(self, transfer: Transfer, layers: StreamedLayers, seconds: float, peak: int) -> Trained:
        losses = self.work.once(f"losses.{transfer.label}", lambda: layers.mean_losses())
        score = StageScore(
            name=transfer.label,
            kind=transfer.kind,
            tokens=layers.tokens,
            loss_first=losses[0] if losses else float("nan"),
            loss_last=losses[-1] if losses else float("nan"),
            seconds=seconds,
            peak_memory=peak,
        )
        counts = {name: read_tensor(file, name).numel() for name, file in layers.overlay.items()}
        entry = {
            "group": "new",
            "learning_rate": transfer.learning_rates.get("new"),
            "parameters": sum(counts.values()),
        }
        manifest = {transfer.label: [{**entry, "tensors": sorted(counts)}]} if losses else {}
        return Trained([score] if losses else [], None, counts if losses else {}, manifest)

    def _streamed(self, trained: Trained, layers: StreamedLayers) -> Outcome:
        """Export, measure and check block by block."""
        work = self.work
        student = build_student(self._shapes(), self.plan)
        with work.timed("export"):
            shutil.rmtree(work.student, ignore_errors=True)
            tensors = StreamedTensors(student, self.source, layers.overlay)
            record = self.record(trained)
            export(student, self.teacher.folder, work.student, record, tensors, self._logits)
        with work.timed("measure"):
            made = LayerStream(work.student, self.dtype, self.device)
            score = LanguageScore(**work.once("score.student", lambda: self._score(made)))
            ids = self.data.heldout.blocks[:COMPARED]
            work.once("layer_errors.student", lambda: layer_errors_streamed(self.source, made, ids))
        trained.score = score
        for stage in trained.stages:
            stage.note(score)
        say(f"student: perplexity {score.perplexity:.3f} (teacher {score.teacher_perplexity:.3f}), KL {score.kl:.4f}")
        say("parity gate, in a fresh process: the checks that need one block at a time")
        with work.timed("gate"):
            gate = verify_in_fresh_process(work.student, streamed=True)
        sample = Sample(prompt="", teacher=_NOT_GENERATED, student=_NOT_GENERATED)
        new = sum(p.numel() for p in new_parameters(student).values())
        parameters = count_parameters(student, new, trained)
        return Outcome(student, None, score, trained, None, sample, parameters, gate)

    def _logits(self, folder: Path, input_ids: torch.Tensor) -> torch.Tensor:
        return LayerStream(folder, self.dtype).forward(input_ids)

    def _score(self, made: LayerStream) -> dict[str, float]:
        return asdict(score_streamed(self.source, made, self.data.heldout, self.work.folder / "stream"))

    def _whole(self, trained: Trained, layers: StreamedLayers, later: list[Stage]) -> Outcome:
        """Later stages train the whole model, which begins with the streamed layers."""
        model = load_teacher(self.teacher.folder, self.dtype, self.device)
        torch.manual_seed(self.recipe.seed)
        student = build_student(model, self.plan)
        new = sum(p.numel() for p in new_parameters(student).values())
        apply_layers(student, layers.overlay)
        training = Training(student, model, self.recipe, self.data, self.work)
        training.result = trained
        score = training.measure(self.stages[0].label)
        for stage in trained.stages:
            stage.note(score)
        training.run([self.stages[0].model_copy(update={"tokens": 0}), *later])
        self._compare_layers("student", student, model)
        return self.outcome(student, model, new, trained, None, trained.score or score, None)

    def _shapes(self) -> PreTrainedModel:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.source.model.config, dtype=self.dtype)


@torch.no_grad()
def apply_layers(student: PreTrainedModel, overlay: dict[str, Path]) -> None:
    """Give a student the tensors of a streamed transfer, in place; projections that it shares with its teacher get
    weights of their own."""
    new = new_parameters(student)
    for name, file in overlay.items():
        tensor = read_tensor(file, name)
        if name in new:
            new[name].copy_(tensor)
            continue
        path, _, attribute = name.rpartition(".")
        parent, _, child = path.rpartition(".")
        old = student.get_submodule(path)
        fresh = type(old).__new__(type(old))
        fresh.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in old.__dict__.items()})
        fresh._parameters[attribute] = nn.Parameter(tensor.to(old.get_parameter(attribute)), requires_grad=False)
        setattr(student.get_submodule(parent), child, fresh)
