"""Training small students on several processes: what the tests on CPUs and on GPUs share."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from linearize.convert import build_student
from linearize.convert.surgery import new_parameters
from linearize.distill import processes
from linearize.distill.data import TokenBlocks
from linearize.distill.stages import STAGES, Round, Workbench
from linearize.distill.trainer import LoopConfig, train
from tests.families import random_teacher

PLACEMENTS: dict[str, dict[str, str]] = {
    "ddp": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
}
"""What `accelerate launch` puts into the environment for each of the shipped configurations."""

ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_MIXED_PRECISION": "no"}
"""For DeepSpeed's, which is only tested where that is installed."""

DATA = TokenBlocks(torch.randint(2, 64, (64 * 32,), generator=torch.Generator().manual_seed(0)), 32)


@dataclass
class Bench:
    """A small student and what is to be trained of it."""

    student: Any
    part: Round


def rounds(
    stage: dict[str, Any],
    folder: Path,
    family: str = "qwen2",
    to: str = "rodimus",
    device: str = "cpu",
    dtype: str = "float32",
    **changes: Any,
) -> Iterator[Bench]:
    """The rounds of a stage on a small student.

    Args:
        stage: the stage's settings, `kind` among them.
        changes: of the teacher's configuration.
    """
    teacher = random_teacher(family, **changes).to(device, getattr(torch, dtype))
    student = build_student(teacher, to, window=8, calibration=DATA.blocks[:4])
    new = frozenset(new_parameters(student))
    for part in STAGES[stage["kind"]](**stage).prepare(Workbench(student, teacher, new, DATA, 4, 4, 0, folder / "s")):
        yield Bench(student, part)


def bench(stage: dict[str, Any], folder: Path, family: str = "qwen2", **changes: Any) -> Bench:
    """The first of `rounds`."""
    return next(rounds(stage, folder, family, **changes))


def train_stage(folder: Path, stage: dict[str, Any], loop: dict[str, Any], **options: Any) -> None:
    """Train a stage on a small student; leaves `losses.json` and `student.safetensors` in the folder.

    Args:
        loop: settings of `LoopConfig`.
        options: see `rounds`.
    """
    processes.start(cpu=options.get("device", "cpu") == "cpu")  # before tensors go to the process's own GPU
    config = LoopConfig(**{"steps": 4, "batch_size": 4, "seed": 0, **loop})
    losses: list[float] = []
    for number, work in enumerate(rounds(stage, folder, **options)):
        log = train(
            stage["kind"], work.part.objective, work.part.groups, DATA, config, folder / f"{number}.safetensors"
        )
        losses += log.losses
    if processes.is_main():
        (folder / "losses.json").write_text(json.dumps(losses))
        tensors = {n: p.detach().cpu().clone() for n, p in work.student.named_parameters()}
        save_file(tensors, folder / "student.safetensors")


def results(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    return json.loads((folder / "losses.json").read_text()), load_file(folder / "student.safetensors")


def on_processes(
    count: int, placement: str, work: Any, *arguments: Any, context: str = "fork", dies: bool = False, **named: Any
) -> None:
    """Run `work(*arguments, **named)` in `count` processes as `accelerate launch` would start them.

    Args:
        dies: whether all of them must end before they are done.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        environment = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "RANK": str(rank),
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count), **{**PLACEMENTS, "zero": ZERO}[placement],
        }  # fmt: skip
        target = multiprocessing.get_context(context).Process(target=_child, args=(environment, work, arguments, named))
        target.start()
        children.append(target)
    for child in children:
        child.join(300)
        if child.is_alive():
            child.kill()
            child.join()
    codes = [child.exitcode for child in children]
    assert all(codes) if dies else not any(codes), codes


def _child(environment: dict[str, str], work: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    work(*arguments, **named)
    processes.stop()
