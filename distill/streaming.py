"""Attention transfer one layer at a time: memory holds one block and a batch, activations lie on disk.

The teacher's hidden states of every training sequence are kept in a file. Each layer reads them, trains its mixer
against the attention it replaces, and leaves the teacher's output in a second file, which the next layer reads. A
finished layer is one small safetensors file, so a run that was killed goes on at the layer, and the step, where it
stood.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from linearize.convert.calibration import calibration_route, routed, teacher_heads
from linearize.convert.checkpoint import tensor_names
from linearize.convert.errors import ConversionError
from linearize.convert.layer_stream import BlockCall, LayerStream, run_block
from linearize.convert.mixers import Mixer
from linearize.convert.model import install_block
from linearize.convert.plan import Plan
from linearize.convert.surgery import new_parameters, student_mixers
from linearize.distill.adapters import attach_adapters, merge_adapters
from linearize.distill.capture import Seen
from linearize.distill.data import TokenBlocks
from linearize.distill.evaluate.language import LanguageScore, language_sums
from linearize.distill.parameters import trainable_groups
from linearize.distill.progress import meter, say
from linearize.distill.stages.transfer import Transfer
from linearize.distill.trainer import LoopConfig, TrainingLog, train

STREAMED_GROUPS = {"new", "adapters"}


@dataclass(frozen=True)
class StreamedLayers:
    """What a streamed transfer leaves.

    Attributes:
        overlay: tensor name -> the file that holds it, for every tensor that is new or changed.
        logs: of every trained layer, by index.
        tokens: that each layer was trained on.
    """

    overlay: dict[str, Path]
    logs: dict[int, TrainingLog]
    tokens: int

    def mean_losses(self) -> list[float]:
        """One per step: the mean over the trained layers."""
        columns = zip(*(log.losses for log in self.logs.values()), strict=True)
        return [sum(column) / len(column) for column in columns]


class _Activations:
    """Hidden states `[N, T, D]` in a file that the system pages in and out."""

    def __init__(self, file: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.file = file
        self.tensor = torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype).view(shape)


class _BlockTransfer(nn.Module):
    """The objective of one layer: reads hidden states by index, leaves the teacher's output behind.

    Args:
        source, target: what enters and what leaves the teacher's block.
    """

    def __init__(
        self, block: nn.Module, call: BlockCall, settings: Transfer, source: _Activations, target: _Activations
    ) -> None:
        super().__init__()
        self.block, self.call, self.source, self.target = block, call, source, target
        self.mixers = student_mixers(block)  # none in a layer that keeps softmax
        self.settings = settings

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """indices `[B, 1]` of sequences -> the mixer's error, a scalar."""
        seen = self.teach(indices[:, 0].cpu(), self.call)
        error, _ = self.settings.layer_error(self.mixers[0], seen[0].hidden_states, seen[0])
        return self.settings.scale * error

    @torch.no_grad()
    def teach(self, where: torch.Tensor, call: BlockCall) -> list[Seen]:
        """Run the teacher's block over some sequences; returns what its attention saw."""
        found: list[Seen] = []
        hidden = self.source.tensor[where].to(next(self.block.parameters()).device)

        def route(mixer: Mixer, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
            output, heads = teacher_heads(mixer, hidden_states, **kwargs)
            found.append(Seen(hidden_states, kwargs, output, heads, hidden))
            return output, None

        with routed(self.mixers, route):
            self.target.tensor[where] = run_block(self.block, hidden, call).cpu()
        return found


def stream_transfer(
    teacher: LayerStream,
    plan: Plan,
    data: TokenBlocks,
    settings: Transfer,
    folder: Path,
    calibration: int,
    seed: int,
) -> StreamedLayers:
    """Build and train every planned mixer, layer by layer.

    Args:
        data: training sequences; `settings.tokens` of them are read, in an order of `seed`.
        folder: for activations, states and finished layers; an earlier run that stopped is continued.
        calibration: sequences from which mixers set their new tensors in closed form; 0 for none.

    Raises:
        ConversionError: the settings ask for what one layer cannot do alone.
        NonFiniteLoss: see `train`; the layers before it are kept.
    """
    _check(settings)
    folder.mkdir(parents=True, exist_ok=True)
    assert settings.batch_size is not None
    steps = max(1, math.ceil(settings.tokens / (settings.batch_size * data.length))) if settings.tokens else 0
    count = min(len(data), max(steps * settings.batch_size, calibration, 1))
    ids = data.batch(0, count, seed)
    stream = _Streamed(teacher, plan, ids, settings, folder, steps, calibration, seed)
    overlay: dict[str, Path] = {}
    logs: dict[int, TrainingLog] = {}
    with meter("layers", len(plan.layers), stream.finished()) as progress:
        for index in range(len(plan.layers)):
            log = stream.layer(index)
            if log is not None:
                logs[index] = log
            progress.update(index + 1, steps * settings.batch_size * data.length)
    for index in range(len(plan.layers)):
        file = stream.result(index)
        overlay |= dict.fromkeys(tensor_names(file), file)
    stream.clean()
    return StreamedLayers(overlay, logs, steps * settings.batch_size * data.length)


@torch.no_grad()
def score_streamed(teacher: LayerStream, student: LayerStream, data: TokenBlocks, folder: Path) -> LanguageScore:
    """`score_language` with one block in memory; hidden states of both models lie in `folder` meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = (*data.blocks.shape, teacher.model.config.hidden_size)
    hidden = [_Activations(folder / f"score-{i}.bin", shape, teacher.dtype) for i in range(2)]
    with meter("measure", len(teacher.layers)) as progress:
        for model, states in zip((student, teacher), hidden, strict=True):
            with model.surroundings():
                for i, row in enumerate(data.blocks):
                    entering, calls = model.call(row[None])
                    states.tensor[i] = entering[0].cpu()
            for index, call in enumerate(calls):
                with model.block(index) as block:
                    for i in range(len(data)):
                        states.tensor[i] = run_block(block, states.tensor[i : i + 1].to(model.device), call)[0].cpu()
                if model is teacher:
                    progress.update(index + 1, data.blocks.numel())
    sums = torch.zeros(5, dtype=torch.float64)
    with student.surroundings(), teacher.surroundings():
        for i, row in enumerate(data.blocks):
            logits = [
                model.logits(states.tensor[i : i + 1].to(model.device), row[None])[0, :-1]
                for model, states in zip((student, teacher), hidden, strict=True)
            ]
            sums += language_sums(logits[0], logits[1], row[1:].to(logits[0].device))
    for states in hidden:
        states.file.unlink()
    tokens = data.blocks[:, 1:].numel()
    return LanguageScore.of(sums / tokens, tokens)


def _check(settings: Transfer) -> None:
    if not settings.teacher_forced:
        raise ConversionError("stream = true trains layers one by one, so teacher_forced must be true")
    if odd := set(settings.learning_rates) - STREAMED_GROUPS:
        raise ConversionError(
            f"stream = true trains new tensors and adapters; leave {sorted(odd)[0]!r} out of learning_rates"
        )
    if "adapters" in settings.learning_rates and settings.targets != ["attention"]:
        raise ConversionError(f"stream = true adapts the attention only; targets is {settings.targets}")


class _Streamed:
    """One streamed transfer: files and the steps of one layer."""

    def __init__(
        self, teacher: LayerStream, plan: Plan, ids: torch.Tensor, settings: Transfer, folder: Path, steps: int,
        calibration: int, seed: int,
    ) -> None:  # fmt: skip
        self.teacher, self.plan, self.ids, self.settings = teacher, plan, ids, settings
        self.folder, self.steps, self.calibration, self.seed = folder, steps, calibration, seed
        assert settings.batch_size is not None, "decided before"
        self.batch_size = settings.batch_size

    def result(self, index: int) -> Path:
        """A finished layer's new and changed tensors."""
        return self.folder / f"layer-{index:05d}.safetensors"

    def finished(self) -> int:
        return next(i for i in range(len(self.plan.layers) + 1) if not self.result(i).is_file())

    def _activations(self, index: int) -> _Activations:
        """What enters layer `index`."""
        width = self.teacher.model.config.hidden_size
        file = self.folder / f"hidden-{index % 2}.bin"
        return _Activations(file, (*self.ids.shape, width), self.teacher.dtype)

    def layer(self, index: int) -> TrainingLog | None:
        """Train one layer, unless it is finished; None if there was nothing to train."""
        if self.result(index).is_file():
            return None
        calls, prefix = self._calls(index), self.teacher.block_names[index] + "."
        source, target = self._activations(index), self._activations(index + 1)
        torch.manual_seed(self.seed * 100_003 + index)
        with self.teacher.block(index) as block:
            install_block(block, self.teacher.attention_name, self.plan.layers[index], self.teacher.model.config)
            block.to(self.teacher.device)
            before = {name: id(p) for name, p in block.named_parameters()}
            new = frozenset(new_parameters(block))
            objective = _BlockTransfer(block, calls[self.batch_size], self.settings, source, target)
            if self.calibration:
                self._calibrate(objective, calls[self.calibration])
            log = self._train(index, objective, frozenset(prefix + name for name in new))
            if log is None or self.steps * self.batch_size < len(self.ids):  # some were not visited in training
                for i in range(len(self.ids)):
                    objective.teach(torch.tensor([i]), calls[1])
            merge_adapters(block)
            tensors = {prefix + n: p.detach() for n, p in block.named_parameters() if n in new or before.get(n) != id(p)}
            _save(tensors, self.result(index))
            self.teacher.model.__dict__.pop("peft_config", None)  # else the next layer's adapters come with a warning
        return log

    def _calls(self, index: int) -> dict[int, BlockCall]:
        """How the block is called, by batch size; before the first layer the embedded tokens are written too."""
        sizes = {self.batch_size, self.calibration or 1, 1}
        with self.teacher.surroundings(), torch.no_grad():
            calls = {size: self.teacher.call(self.ids[:1].expand(size, -1))[1][index] for size in sizes}
            if index == 0:
                entering = self._activations(0)
                for i, row in enumerate(self.ids):
                    entering.tensor[i] = self.teacher.call(row[None])[0][0].cpu()
        return calls

    @torch.no_grad()
    def _calibrate(self, objective: _BlockTransfer, call: BlockCall) -> None:
        hidden = objective.source.tensor[: self.calibration].to(self.teacher.device)
        with routed(objective.mixers, calibration_route):
            run_block(objective.block, hidden, call)

    def _train(self, index: int, objective: _BlockTransfer, new: frozenset[str]) -> TrainingLog | None:
        settings = self.settings
        if not objective.mixers or not self.steps:
            return None
        if "adapters" in settings.learning_rates:
            attach_adapters(self.teacher.model, settings.rank, settings.alpha, tuple(settings.targets))
        groups = trainable_groups(self.teacher.model, new, settings.learning_rates, settings.weight_decay)
        config = LoopConfig(
            steps=self.steps, batch_size=self.batch_size, seed=self.seed, schedule=settings.schedule,
            warmup=settings.warmup, final_rate=settings.final_rate, clip=settings.clip,
        )  # fmt: skip
        order = TokenBlocks(torch.arange(len(self.ids)), 1)
        log = train(f"layer {index}", objective, groups, order, config, self.folder / f"state-{index:05d}.safetensors")
        say(f"layer {index}: loss {log.losses[0]:.4f} -> {log.losses[-1]:.4f}")
        return log

    def clean(self) -> None:
        """Remove activations and states; finished layers stay."""
        for file in (*self.folder.glob("hidden-*.bin"), *self.folder.glob("state-*.safetensors")):
            file.unlink()


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    temporary = file.with_suffix(".tmp")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary)
    os.replace(temporary, file)
