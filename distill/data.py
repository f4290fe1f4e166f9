"""Text to token blocks: reading, splitting off the held-out part, tokenising, packing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linearize.convert.errors import ConversionError

DOCUMENT_SEPARATOR = "<|endoftext|>"
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents kept for measuring.

    Attributes:
        source: what the text is, for the card.
    """

    source: str
    train: list[str]
    heldout: list[str]


def read_corpus(source: str | Path) -> Corpus:
    """Read a text file, a `.jsonl` file with a `text` field, a folder of either, a saved dataset or a Hub dataset.

    The last tenth (by characters) is held out. In text files, `<|endoftext|>` separates documents.

    Raises:
        ConversionError: nothing of the kind is there, or it holds no text.
    """
    path = Path(source).expanduser()
    if path.is_file():
        documents = list(_read_file(path))
    elif path.is_dir() and (path / "dataset_info.json").is_file() | (path / "dataset_dict.json").is_file():
        documents = _read_dataset(str(path), saved=True)
    elif path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in (".txt", ".md", ".jsonl", ".py", ".rst"))
        documents = [document for file in files for document in _read_file(file)]
    elif str(source).startswith((".", "/", "~")) or path.suffix in (".txt", ".jsonl"):
        raise ConversionError(f"--data {source}: no such file or folder")
    else:
        documents = _read_dataset(str(source), saved=False)
    documents = [d for d in documents if d.strip()]
    if not documents:
        raise ConversionError(f"--data {source} holds no text")
    return Corpus(str(source), *split_heldout(documents))


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


def _read_file(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConversionError(f"--data {path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    yield json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    raise ConversionError(
                        f"--data {path}, line {number}: not a JSON object with a 'text' field"
                    ) from None
    else:
        yield from (part.strip("\n") for part in text.split(DOCUMENT_SEPARATOR))


def _read_dataset(name: str, saved: bool) -> list[str]:
    import datasets  # slow to import, seldom needed

    try:
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConversionError(f"--data {name} is no file, folder or reachable dataset: {reason}") from None
    split = loaded["train"] if isinstance(loaded, dict) and "train" in loaded else loaded
    if isinstance(split, dict):
        split = next(iter(split.values()))
    if "text" not in split.column_names:
        raise ConversionError(f"--data {name} has no column 'text' (its columns: {', '.join(split.column_names)})")
    return list(split["text"])


def tokenize(documents: Iterable[str], tokenizer: Any, limit: int | None = None) -> torch.Tensor:
    """One stream of token ids, documents marked as the tokenizer marks them; stops after `limit` tokens.

    A tokenizer that adds no special token of its own gets its bos (else its eos) in front of every document.
    """
    mark: list[int] = []
    if tokenizer("a").input_ids[:1] != [tokenizer.bos_token_id]:
        marker = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        mark = [marker] if marker is not None else []
    ids: list[int] = []
    for document in documents:
        ids += mark + tokenizer(document, verbose=False).input_ids
        if limit is not None and len(ids) >= limit:
            return torch.tensor(ids[:limit])
    return torch.tensor(ids, dtype=torch.long)


class TokenBlocks:
    """A token stream cut into blocks of `length`, visited in an order that is a pure function of seed and step."""

    def __init__(self, stream: torch.Tensor, length: int, what: str = "the text") -> None:
        count = stream.numel() // length
        if count == 0:
            raise ConversionError(
                f"{what} is too short: {stream.numel()} tokens, one sequence has {length}; give more text or a smaller --context"
            )
        self.blocks = stream[: count * length].view(count, length)
        self.length = length

    def __len__(self) -> int:
        return self.blocks.shape[0]

    def spread(self, tokens: int) -> TokenBlocks:
        """At most `tokens` tokens of it (one block at least), taken at even distances over the whole."""
        count = max(1, min(len(self), tokens // self.length))
        chosen = self.blocks[[i * len(self) // count for i in range(count)]]
        return TokenBlocks(chosen.flatten(), self.length)

    def batch(self, step: int, size: int, seed: int) -> torch.Tensor:
        """Token ids `[size, length]` of one step. Every epoch visits every block once, in an order of its own."""
        order = []
        for position in range(step * size, (step + 1) * size):
            epoch, index = divmod(position, len(self))
            order.append(int(self._permutation(epoch, seed)[index]))
        return self.blocks[order]

    def _permutation(self, epoch: int, seed: int) -> torch.Tensor:
        key = (epoch, seed)
        if getattr(self, "_cached", (None, None))[0] != key:
            generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
            self._cached = (key, torch.randperm(len(self), generator=generator))
        return self._cached[1]
