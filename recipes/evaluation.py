"""Measuring an exported student: finds its teacher and its text, then asks `distill.evaluate`."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from linearize.convert.checkpoint import load_teacher, load_tokenizer
from linearize.convert.errors import ConversionError
from linearize.convert.export import RECORD
from linearize.distill.data import tokenize
from linearize.distill.device import choose_device
from linearize.distill.evaluate.suite import QUESTIONS, Evaluation, Settings, Subject, evaluate
from linearize.distill.progress import say
from linearize.distill.reading import Source, read_corpus
from linearize.recipes.python_corpus import documents
from linearize.recipes.teachers import resolve_teacher


def evaluate_directory(
    directory: str | Path,
    teacher: str | None = None,
    questions: tuple[str, ...] = QUESTIONS,
    settings: Settings | None = None,
    data: str | None = None,
    retrieval: Path | None = None,
    tasks_data: Path | None = None,
    device: str = "auto",
    date: str | None = None,
) -> Evaluation:
    """Measure an exported student against its teacher.

    Args:
        teacher: a bundled name, a folder or a Hub id; None for the one that the student's record names.
        data: text to measure on, all of it; None for the held-out part of what the student was converted on.
        date: kept with the conditions.

    Raises:
        ConversionError: the folder is no exported student, or teacher, text or a task's data cannot be read.
    """
    folder = Path(directory)
    recipe = read_record(folder).get("recipe", {})
    name, revision = (teacher, None) if teacher else (recipe.get("teacher"), recipe.get("revision"))
    if name is None:
        raise ConversionError(f"{folder}/{RECORD} names no teacher; give it with --teacher")
    try:
        source = resolve_teacher(name, revision)
    except ConversionError as error:
        raise ConversionError(f"the teacher cannot be found: {error}; give it with --teacher") from None
    chosen = choose_device(device)
    tokenizer = load_tokenizer(folder)
    student: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    student = student.to(chosen).eval()
    loaded = load_teacher(source.folder, student.dtype, chosen)
    if student.config.vocab_size != loaded.config.vocab_size:
        raise ConversionError(
            f"{source.label} has {loaded.config.vocab_size} tokens, the student {student.config.vocab_size}: "
            "it is not its teacher"
        )
    label, texts = heldout_text(data, recipe.get("data"), recipe.get("streaming", False))
    stream = tokenize(texts, tokenizer)
    if stream.numel() < 2:
        raise ConversionError(f"{label} is too short to measure on; give more text with --data")
    say(f"{folder.name} against {source.label}, on {stream.numel():,} tokens of {label}")
    subject = Subject(
        student, loaded, tokenizer, stream, folder.resolve().name, source.name, label, retrieval, tasks_data
    )
    return evaluate(subject, questions, settings, date)


def read_record(folder: Path) -> dict[str, Any]:
    """What the conversion wrote beside the student.

    Raises:
        ConversionError: the folder is no exported student.
    """
    if not (folder / RECORD).is_file():
        raise ConversionError(f"{folder} is not an exported student: it has no {RECORD}")
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))


def heldout_text(data: str | None, converted_on: Source, streaming: bool = False) -> tuple[str, list[str]]:
    """What the text is, and its documents: none that the student was trained on.

    Args:
        data: what the user names; None for `converted_on`, and that None for Python's standard library.
    """
    if data is not None and data != converted_on:
        corpus = read_corpus(data)
        return corpus.source, [*corpus.train, *corpus.heldout]
    if converted_on is not None:
        corpus = read_corpus(converted_on, streaming)
        return (
            f"the held-out part of {corpus.source}" if streaming else f"the last tenth of {corpus.source}",
            corpus.heldout,
        )
    return f"held-out modules of the standard library of Python {platform.python_version()}", documents("heldout")
