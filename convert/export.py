"""Writing a student as a folder that loads anywhere: tensors, configuration, tokenizer, ledger, parity record."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from linearize.convert.checkpoint import (
    checkpoint_tensors,
    read_tensor,
    tensor_names,
    weight_files,
    write_tensors,
)
from linearize.convert.errors import ConversionError
from linearize.convert.model import PACKAGE_VERSION

RECORD = "linearize.json"
PARITY = "linearize_parity.safetensors"
SHIM = "modeling_linearized.py"
_PARITY_SHAPE = (2, 96)

Origin = Literal["copied", "trained", "created"]

_COPIED_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json",
    "chat_template*", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*", "*.tiktoken", "sentencepiece*",
)  # fmt: skip

_SHIM_TEXT = '''"""Loads this checkpoint with the `linearize` package: pip install linearize"""
from linearize.convert.model import student_classes

LinearizedConfig, LinearizedForCausalLM = student_classes("{family}")
'''


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What became of every tensor.

    Attributes:
        origin: tensor name -> "copied" (bit for bit), "trained" (changed) or "created" (the teacher has none).
        dropped: tensors of the teacher that the student has no use for.
        digest: SHA-256 of every copied tensor, taken from the teacher's file in the student's dtype.
    """

    origin: dict[str, Origin]
    dropped: list[str]
    digest: dict[str, str]


def export(
    student: PreTrainedModel,
    source_dir: str | Path,
    out_dir: str | Path,
    record: dict[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    logits: Callable[[Path, torch.Tensor], torch.Tensor] | None = None,
) -> Path:
    """Write `student` to `out_dir`, which must not exist or be empty.

    Everything goes to `<out_dir>.partial` first and is renamed at the end.

    Args:
        student: with merged adapters, in the dtype to be written.
        source_dir: the teacher's folder; its tokenizer, template, generation and licence files are copied as they are.
        record: kept in `linearize.json` beside the ledger: command, recipe, measurements.
        tensors: what to write, if the student does not hold it itself (see `StreamedTensors`).
        logits: `logits(folder, input_ids)` of the student as it was just written; None for its own forward.

    Raises:
        ConversionError: the output is not empty, equals the source, or a tensor is not finite.
    """
    source, out = Path(source_dir), Path(out_dir)
    check_output(source, out)
    shapes = checkpoint_tensors(student)
    tensors = shapes if tensors is None else tensors
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ConversionError(f"{name} is not finite after training; nothing was exported. Lower the learning rate")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_tensors(tensors, shapes, partial)
    files = copy_files(source, partial)
    _write_config(student, partial)
    _write_parity(student, partial, logits)
    ledger = make_ledger(tensors, source)
    (partial / RECORD).write_text(
        json.dumps({**(record or {}), "files": files, **dataclasses.asdict(ledger)}, indent=1)
    )
    if out.exists():
        out.rmdir()
    os.replace(partial, out)
    return out


def check_output(source: Path, out: Path) -> None:
    """Refuse an output that would overwrite something."""
    if out.resolve() == source.resolve():
        raise ConversionError(f"output {out} is the teacher's own folder; choose another with --out")
    if out.is_file():
        raise ConversionError(f"output {out} is a file; choose a folder with --out")
    if out.is_dir() and any(out.iterdir()):
        raise ConversionError(f"output {out} is not empty; choose another with --out or overwrite it with --force")


def copy_files(source: Path, target: Path) -> dict[str, str]:
    """Copy the teacher's tokenizer, template, generation and licence files; returns name -> SHA-256."""
    digests = {}
    for pattern in _COPIED_FILES:
        for file in source.glob(pattern):
            if file.is_file() and file.suffix not in (".safetensors", ".bin"):
                shutil.copyfile(file, target / file.name)
                digests[file.name] = file_digest(target / file.name)
    return dict(sorted(digests.items()))


def make_ledger(tensors: Mapping[str, torch.Tensor], source: Path) -> Ledger:
    """Compare the student's tensors with the teacher's files, tensor by tensor."""
    origin: dict[str, Origin] = {}
    digest: dict[str, str] = {}
    dropped = []
    for file in weight_files(source):
        for name in tensor_names(file):
            if name not in tensors:
                dropped.append(name)
                continue
            mine = tensors[name].cpu()
            theirs = read_tensor(file, name).to(mine.dtype)
            copied = mine.shape == theirs.shape and torch.equal(mine, theirs)
            origin[name] = "copied" if copied else "trained"
            if copied:
                digest[name] = tensor_digest(theirs)
    for name in tensors:
        origin.setdefault(name, "created")
    return Ledger(dict(sorted(origin.items())), sorted(dropped), dict(sorted(digest.items())))


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def file_digest(file: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _write_config(student: PreTrainedModel, folder: Path) -> None:
    config = student.config.to_dict()
    config.pop("_attn_implementation_internal", None)
    config["linearize"] |= {"version": PACKAGE_VERSION, "layers": student.config.plan.with_defaults().to_config()}
    config["dtype"] = str(student.dtype).removeprefix("torch.")
    module = SHIM.removesuffix(".py")
    config["auto_map"] = {
        "AutoConfig": f"{module}.LinearizedConfig",
        "AutoModelForCausalLM": f"{module}.LinearizedForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / SHIM).write_text(_SHIM_TEXT.format(family=config["linearize"]["base_model_type"]))


def parity_outputs(model: PreTrainedModel, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is compared between memory and reload: log-probabilities of the tokens read, and the last logits."""
    with torch.no_grad():
        return parity_of(model(input_ids=input_ids.to(model.device), use_cache=False).logits, input_ids)


def parity_of(logits: torch.Tensor, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same from logits `[B, T, vocab]`."""
    logits = logits.float()
    log_probs = logits.log_softmax(-1)[:, :-1]
    taken = log_probs.gather(-1, input_ids[:, 1:, None].to(logits.device))[..., 0]
    return {"token_log_probs": taken.cpu(), "last_logits": logits[:, -1].contiguous().cpu()}


def _write_parity(
    student: PreTrainedModel, folder: Path, logits: Callable[[Path, torch.Tensor], torch.Tensor] | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    batch, tokens = _PARITY_SHAPE
    longest = getattr(student.config, "max_position_embeddings", None) or tokens
    input_ids = torch.randint(student.config.vocab_size, (batch, min(tokens, longest)), generator=generator)
    if logits is None:
        training = student.training
        outputs = parity_outputs(student.eval(), input_ids)
        student.train(training)
    else:
        outputs = parity_of(logits(folder, input_ids), input_ids)
    save_file({"input_ids": input_ids, **outputs}, folder / PARITY)
