"""Steps of the stages as the trainer takes them, timed: speed, share of the matrix rate, memory, where time goes."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.convert.checkpoint import load_teacher
from linearize.convert.errors import ConversionError
from linearize.convert.surgery import as_teacher, build_student, new_parameters, student_mixers
from linearize.distill.benchmarks import flops
from linearize.distill.benchmarks.flops import Flops
from linearize.distill.benchmarks.kernels import KernelTimes, kernel_times
from linearize.distill.benchmarks.shapes import SHAPES, random_teacher
from linearize.distill.compiled import compiled
from linearize.distill.data import TokenBlocks
from linearize.distill.fused_norms import fused_norms
from linearize.distill.memory import peak_memory
from linearize.distill.placement import Groups, Placement
from linearize.distill.reference import last_hidden
from linearize.distill.stages import Lora, Stage, Transfer, Workbench

_RATE = 1e-6  # so small that a random model stays what it is
_CLIP = 1.0


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        teacher: a name of `SHAPES`, or a folder or Hub id of a teacher.
        to: the mixer, or a plan.
        context: tokens per sequence.
        rows: which of `ROWS`; empty for all.
        steps: timed ones, after `warmup` others.
        compile: whether mixers, attention and MLPs run through torch.compile.
        profile: whether one more step is profiled (on a GPU).
        parts: whether single parts of a layer are timed (on a GPU).
    """

    teacher: str = "1b"
    to: str = "rodimus"
    options: dict[str, Any] = field(default_factory=dict)
    context: int = 2048
    batch_size: int = 8
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    rows: tuple[str, ...] = ()
    steps: int = 8
    warmup: int = 3
    compile: bool = False
    profile: bool = True
    parts: bool = True


@dataclass
class StepRow:
    """One kind of step. Times are medians in milliseconds, memory is in bytes.

    Attributes:
        forward_ms, backward_ms, update_ms: its pieces; backward and update are 0 for a forward pass alone.
        flops: per token that the step needs, see `flops`.
        mfu: `flops` over time and measured matrix rate.
        trains: how many numbers.
        base: allocated between steps: tensors, the optimizer's state.
        held: allocated by the forward pass and kept for the backward pass.
        peak: highest during a step.
        first_s: the first step, in which kernels are compiled.
    """

    name: str
    ms: float = 0.0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    update_ms: float = 0.0
    tokens_per_s: float = 0.0
    flops: Flops = field(default_factory=Flops)
    mfu: float = 0.0
    trains: int = 0
    base: int = 0
    held: int = 0
    peak: int = 0
    first_s: float = 0.0
    kernels: KernelTimes | None = None
    problem: str | None = None


@dataclass
class TrainingReport:
    """All rows.

    Attributes:
        matrix_rate: measured, FLOPs per second in the model's dtype.
        parts: part of one layer -> milliseconds forward, and forward and backward.
    """

    settings: Settings
    machine: str
    matrix_rate: float
    parameters: int
    new_parameters: int
    layers: int
    rows: list[StepRow] = field(default_factory=list)
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)


class Bench:
    """A teacher, its student, random text, and a clock."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        self.teacher = _teacher(settings, self.device)
        self.student = build_student(self.teacher, settings.to, **settings.options)
        self.new = frozenset(new_parameters(self.student))
        vocab, count = self.student.config.vocab_size, 4 * settings.batch_size
        ids = torch.randint(vocab, (count * settings.context,), generator=torch.Generator().manual_seed(0))
        self.data = TokenBlocks(ids, settings.context)

    def batch(self, step: int) -> torch.Tensor:
        return self.data.batch(step, self.settings.batch_size, 0).to(self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        """A point in time of the device."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Milliseconds."""
        return start.elapsed_time(end) if self.device.type == "cuda" else 1e3 * (end - start)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def prepare(self, stage: Stage, folder: Path) -> tuple[Any, Groups]:
        """What the stage minimises, over which tensors."""
        bench = Workbench(
            self.student, self.teacher, self.new, self.data, 1, self.settings.batch_size, 0, folder / "state"
        )
        part = next(iter(stage.prepare(bench)))
        part.objective.train()
        return part.objective, [{**group, "lr": _RATE} for group in part.groups]


Work = tuple[Callable[[int], list[Any]], Flops, int]
"""One step, which returns its points in time: start, and those between its pieces. Its FLOPs, what trains."""


def _trained(bench: Bench, stage: Stage, needs: Callable[[], Flops], folder: Path, held: list[int]) -> Work:
    objective, groups = bench.prepare(stage, folder)
    placement = Placement(objective, groups)

    def step(number: int) -> list[Any]:
        marks, before = [bench.mark()], bench.allocated()
        loss = placement.objective(bench.batch(number))
        held.append(bench.allocated() - before)
        marks.append(bench.mark())
        placement.backward(loss)
        marks.append(bench.mark())
        norm = placement.step(_CLIP, loss.detach())
        float(loss.detach()), float(norm)  # the trainer reads both in every step
        return marks

    return step, needs(), sum(p.numel() for p in placement.named.values())


def _forward(bench: Bench, as_its_teacher: bool, needs: Flops) -> Work:
    def step(number: int) -> list[Any]:
        start = bench.mark()
        with torch.no_grad(), as_teacher(bench.student) if as_its_teacher else nullcontext():
            last_hidden(bench.student, bench.batch(number))
        return [start]

    return step, needs, 0


def _work(bench: Bench, name: str, folder: Path, held: list[int]) -> Work:
    student, context = bench.student, bench.settings.context
    if name in ("teacher forward", "student forward"):
        mine = name == "student forward"
        count = flops.student_forward if mine else flops.teacher_forward
        return _forward(bench, not mine, count(student, context, head=False))
    if name == "transfer":
        return _trained(bench, Transfer(), lambda: flops.transfer_step(student, context), folder, held)
    live = name == "lora"
    stage = Lora() if live else Lora(ce_weight=1.0, kl_weight=0.0)
    return _trained(bench, stage, lambda: flops.distillation_step(student, context, live), folder, held)


ROWS = ("teacher forward", "student forward", "transfer", "lora", "lora without teacher")
"""Forward passes are of the whole body without the head; `lora without teacher` learns by cross-entropy alone."""


def bench_training(settings: Settings, say: Callable[[str], Any] = lambda _: None) -> TrainingReport:
    """Measure every row; one that does not fit into memory says so.

    Raises:
        ConversionError: there is no such shape, mixer, row or device.
    """
    if unknown := [name for name in settings.rows if name not in ROWS]:
        raise ConversionError(f"there is no row {unknown[0]!r} to measure; choose from {', '.join(ROWS)}")
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConversionError("torch sees no CUDA GPU; measure another --device")
    machine, rate = matrix_rate(torch.device(settings.device), settings.dtype)
    bench = Bench(settings)
    report = TrainingReport(
        settings=settings,
        machine=machine,
        matrix_rate=rate,
        parameters=sum(p.numel() for p in bench.student.parameters()),
        new_parameters=sum(p.numel() for n, p in bench.student.named_parameters() if n in bench.new),
        layers=len(student_mixers(bench.student)),
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in settings.rows or ROWS:
            with compiled(bench.student, settings.compile), fused_norms(bench.student):
                row = _measure(bench, name, rate, Path(folder))
            report.rows.append(row)
            say(f"{name}: {row.problem or f'{row.ms:.1f} ms, {100 * row.mfu:.1f}% of the matrix rate'}")
    if settings.parts and bench.device.type == "cuda":
        from linearize.distill.benchmarks.parts import time_parts

        report.parts = time_parts(bench)
    return report


def _measure(bench: Bench, name: str, rate: float, folder: Path) -> StepRow:
    try:
        return _row(bench, name, rate, folder)
    except torch.OutOfMemoryError as error:
        return StepRow(name, problem=str(error).split(". ")[0])
    finally:
        for parameter in bench.student.parameters():
            parameter.grad = None
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _row(bench: Bench, name: str, rate: float, folder: Path) -> StepRow:
    settings = bench.settings
    held: list[int] = []
    step, needs, trains = _work(bench, name, folder, held)
    began = time.perf_counter()
    step(0)
    bench.wait()
    first = time.perf_counter() - began
    for number in range(1, settings.warmup):
        step(number)
    bench.wait()
    base = bench.allocated()
    with peak_memory(bench.device) as peak:
        marks = [step(settings.warmup + number) for number in range(settings.steps + 1)]
        bench.wait()
    # A step ends where the next one begins: what the GPU waits for the host belongs to it.
    steps = [[*points, following[0]] for points, following in pairwise(marks)]
    pieces = [[bench.between(a, b) for a, b in pairwise(points)] for points in steps]
    ms = statistics.median(map(sum, pieces))
    forward, backward, update = ([statistics.median(piece) for piece in zip(*pieces, strict=True)] + [0.0, 0.0])[:3]
    tokens = settings.batch_size * settings.context
    row = StepRow(name, ms, forward, backward, update, 1e3 * tokens / ms, needs, trains=trains, first_s=first)
    row.mfu = needs.total * tokens / (ms / 1e3 * rate)
    row.base, row.peak, row.held = base, peak.bytes, held[-1] if held else 0
    if settings.profile and bench.device.type == "cuda":
        row.kernels = kernel_times(lambda: step(0), bench.wait)
    return row


def _teacher(settings: Settings, device: torch.device) -> PreTrainedModel:
    if settings.teacher in SHAPES:
        return random_teacher(settings.teacher, device, settings.dtype)
    teacher = load_teacher(settings.teacher, settings.dtype, device)
    return teacher.requires_grad_(False)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> tuple[str, float]:
    """The machine's name, and FLOPs per second of a large matrix product (on a GPU always in bfloat16)."""
    if device.type == "cuda":
        from linearize.kernels.bench import measure_machine

        machine = measure_machine()
        torch.cuda.empty_cache()
        return machine.name, machine.matrix_rate
    size, times = 512, []
    a = torch.randn(size, size, device=device, dtype=dtype)
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(a, a)
        times.append(time.perf_counter() - began)
    return f"{device.type}, {torch.get_num_threads()} threads", 2 * size**3 / statistics.median(times)
