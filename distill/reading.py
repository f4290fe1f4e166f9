"""Reading text: files, folders, datasets, mixtures of them; what trains and what is held out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from linearize.convert.errors import ConversionError

DOCUMENT_SEPARATOR = "<|endoftext|>"
HELD_OUT_SHARE = 0.1
_HELD_OUT_EVERY = 10
_HELD_OUT_CHARS = 2_000_000
_CHUNK = 2**20
_SUFFIXES = (".txt", ".md", ".jsonl", ".py", ".rst")

Source = str | Mapping[str, float] | None
"""What a recipe names as data: one source, or several with their shares of the tokens."""


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents kept for measuring.

    Attributes:
        source: what the text is, for the card.
        train: may be walked through any number of times, in the same order; a `Stream` is not held in memory.
        identity: changes whenever a stream's text does; None where that is not known.
    """

    source: str
    train: Iterable[str]
    heldout: list[str]
    identity: str | None = None


def shares_of(source: Mapping[str, float]) -> dict[str, float]:
    """The shares of a mixture, scaled to 1.

    Raises:
        ConversionError: a share is not positive, or there is none.
    """
    for name, share in source.items():
        if not share > 0:
            raise ConversionError(f"data: the share of {name} is {share}; it must be positive")
    if not source:
        raise ConversionError("data: a mixture names no source")
    total = sum(source.values())
    return {name: share / total for name, share in source.items()}


def read_corpus(source: str | Path | Mapping[str, float], streaming: bool = False) -> Corpus:
    """Read a text file, a `.jsonl` file with a `text` field, a folder of either, a saved dataset or a Hub dataset.

    A Hub dataset is `owner/name`, or `owner/name:config`. The last tenth (by characters) is held out. In text files,
    `<|endoftext|>` separates documents. Of a mixture, all the documents.

    Args:
        streaming: read documents as they are asked for and hold none in memory. Then every tenth document is held out,
            up to 2 million characters.

    Raises:
        ConversionError: nothing of the kind is there, or it holds no text.
    """
    if isinstance(source, Mapping):
        corpora = [read_corpus(name, streaming) for name in shares_of(source)]
        label = " + ".join(f"{share:.0%} {name}" for name, share in shares_of(source).items())
        heldout = [document for corpus in corpora for document in corpus.heldout]
        train: Iterable[str] = Stream(lambda: chain.from_iterable(corpus.train for corpus in corpora))
        return Corpus(label, train if streaming else list(train), heldout)
    read = _reader(str(source), streaming)
    documents = Stream(lambda: (d for d in read() if d.strip()))
    if next(iter(documents), None) is None:
        raise ConversionError(f"--data {source} holds no text")
    if not streaming:
        return Corpus(str(source), *split_heldout(list(documents)))
    heldout, last = [], -1
    for number, document in enumerate(documents):
        if number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1:
            heldout.append(document)
            last = number
        if sum(map(len, heldout)) >= _HELD_OUT_CHARS:
            break
    if not heldout:
        raise ConversionError(f"--data {source}: streaming needs {_HELD_OUT_EVERY} documents or more")
    kept = Stream(
        lambda: (d for i, d in enumerate(documents) if i > last or i % _HELD_OUT_EVERY != _HELD_OUT_EVERY - 1)
    )
    return Corpus(str(source), kept, heldout, _identity(str(source)))


class Stream:
    """Documents that are read anew every time they are walked through."""

    def __init__(self, read: Callable[[], Iterator[str]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[str]:
        return self._read()


def split_heldout(documents: list[str], share: float = HELD_OUT_SHARE) -> tuple[list[str], list[str]]:
    """Cut off the last `share` of the characters; the document at the cut is divided."""
    cut = int(sum(map(len, documents)) * (1 - share))
    train: list[str] = []
    for i, document in enumerate(documents):
        if len(document) > cut:
            head, tail = document[:cut], document[cut:]
            return train + [head] * bool(head), [tail, *documents[i + 1 :]]
        train.append(document)
        cut -= len(document)
    return train, []


def _identity(source: str) -> str | None:
    """Of a stream: files by size and time, a Hub dataset by its commit."""
    path = Path(source).expanduser()
    if path.exists():
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
        return repr([(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        return f"{source}@{HfApi().dataset_info(source.partition(':')[0]).sha}"
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError):
        return None


def _reader(source: str, streaming: bool) -> Callable[[], Iterator[str]]:
    path = Path(source).expanduser()
    if path.is_file():
        return lambda: _read_file(path)
    if path.is_dir() and (path / "dataset_info.json").is_file() | (path / "dataset_dict.json").is_file():
        return _read_dataset(str(path), saved=True, streaming=streaming)
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in _SUFFIXES)
        return lambda: chain.from_iterable(map(_read_file, files))
    if source.startswith((".", "/", "~")) or path.suffix in (".txt", ".jsonl"):
        raise ConversionError(f"--data {source}: no such file or folder")
    return _read_dataset(source, saved=False, streaming=streaming)


def _read_file(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as handle:
            yield from _read_lines(path, handle) if path.suffix == ".jsonl" else _read_text(handle)
    except UnicodeDecodeError as error:
        raise ConversionError(f"--data {path} is not UTF-8 text ({error.reason})") from None


def _read_lines(path: Path, handle: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(handle, 1):
        if line.strip():
            try:
                yield json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                raise ConversionError(f"--data {path}, line {number}: not a JSON object with a 'text' field") from None


def _read_text(handle: Any) -> Iterator[str]:
    rest = ""
    while chunk := handle.read(_CHUNK):
        *whole, rest = (rest + chunk).split(DOCUMENT_SEPARATOR)
        yield from (document.strip("\n") for document in whole)
    yield rest.strip("\n")


def _read_dataset(name: str, saved: bool, streaming: bool) -> Callable[[], Iterator[str]]:
    import datasets  # slow to import, seldom needed

    try:
        if saved:
            loaded: Any = datasets.load_from_disk(name)
        else:
            repository, _, config = name.partition(":")
            loaded = datasets.load_dataset(repository, config or None, streaming=streaming)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConversionError(f"--data {name} is no file, folder or reachable dataset: {reason}") from None
    split = loaded["train"] if isinstance(loaded, dict) and "train" in loaded else loaded
    if isinstance(split, dict):
        split = next(iter(split.values()))
    columns = split.column_names or list(next(iter(split), {}))
    if "text" not in columns:
        raise ConversionError(f"--data {name} has no column 'text' (its columns: {', '.join(columns)})")
    return lambda: (row["text"] for row in split)
