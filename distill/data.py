"""Text to token blocks: tokenising, packing, mixing, and the order in which blocks are visited."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from linearize.convert.errors import ConversionError
from linearize.distill.layout import IGNORED
from linearize.distill.reading import Corpus, Stream
from linearize.distill.token_cache import cached, fingerprint, text_hash

Documents = Literal["joined", "packed", "padded"]
"""What becomes of the borders of documents. joined: nothing, rows are running text. packed: rows are full, and the
documents in one do not see each other. padded: every document begins a row of its own."""


@dataclass(frozen=True)
class Tokens:
    """A stream of token ids.

    Attributes:
        ids: `[N]` int32.
        starts: `[D]` int64, where documents begin.
    """

    ids: torch.Tensor
    starts: torch.Tensor

    def blocks(self, length: int, documents: Documents = "joined", what: str = "the text") -> TokenBlocks:
        """Cut into rows of `length` tokens.

        Raises:
            ConversionError: it is shorter than one row.
        """
        if documents == "joined":
            return TokenBlocks(self.ids, length, what)
        if documents == "padded":
            rows = self._padded(length)
        else:
            _refuse_short(self.ids.numel(), length, what)
            count = self.ids.numel() // length
            labels = self.ids.clone()
            labels[self.starts] = IGNORED
            rows = torch.stack([x[: count * length].view(count, length) for x in (self.ids, labels)], 1)
            rows[:, 1, 0] = IGNORED  # the rest of a document that the row before began
        return DocumentBlocks(rows, length)

    def _padded(self, length: int) -> torch.Tensor:
        rows = []
        ends = [*self.starts[1:].tolist(), self.ids.numel()]
        for start, end in zip(self.starts.tolist(), ends, strict=True):
            for piece in self.ids[start:end].split(length):
                if len(piece) > 1:
                    row = torch.stack([torch.zeros(length), torch.full((length,), IGNORED)]).int()
                    row[:, : len(piece)] = piece
                    row[1, 0] = IGNORED
                    rows.append(row)
        if not rows:
            raise ConversionError("no document has two tokens; give more text")
        return torch.stack(rows)


def read_tokens(documents: Iterable[str], tokenizer: Any, limit: int | None = None) -> Tokens:
    """Token ids of documents, each marked as the tokenizer marks them; stops after `limit` tokens.

    A tokenizer that adds no special token of its own gets its bos (else its eos) in front of every document.
    """
    mark: list[int] = []
    if tokenizer("a").input_ids[:1] != [tokenizer.bos_token_id]:
        marker = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        mark = [marker] if marker is not None else []
    ids, starts = array("i"), array("q")
    for document in documents:
        starts.append(len(ids))
        ids.extend(mark + tokenizer(document, verbose=False).input_ids)
        if limit is not None and len(ids) >= limit:
            break
    found = torch.from_numpy(np.array(ids, dtype=np.int32))[:limit]
    return Tokens(found, torch.from_numpy(np.array(starts, dtype=np.int64)))


def cached_tokens(corpus: Corpus, tokenizer: Any, limit: int) -> Tokens:
    """The training text of a corpus as `read_tokens` gives it, kept on disk (`token_cache`)."""
    if isinstance(corpus.train, Stream) and corpus.identity is None:
        return read_tokens(corpus.train, tokenizer, limit)
    text = corpus.identity or text_hash(corpus.train)
    made = cached(
        f"{fingerprint(tokenizer)} {text} {limit}",
        lambda: vars(read_tokens(corpus.train, tokenizer, limit)),
        lambda tensors: tensors["ids"].numel(),
    )
    return Tokens(**made)


def tokenize(documents: Iterable[str], tokenizer: Any, limit: int | None = None) -> torch.Tensor:
    """The ids of `read_tokens`, `[N]` int64."""
    return read_tokens(documents, tokenizer, limit).ids.long()


def _refuse_short(tokens: int, length: int, what: str) -> None:
    if tokens < length:
        raise ConversionError(
            f"{what} is too short: {tokens} tokens, one sequence has {length}; give more text or a smaller --context"
        )


class TokenBlocks:
    """A token stream cut into blocks of `length`, visited in an order that is a pure function of seed and step.

    Attributes:
        apart: whether blocks are documents that must not see each other, ids and labels (see `layout`).
    """

    apart = False

    def __init__(self, stream: torch.Tensor, length: int, what: str = "the text") -> None:
        _refuse_short(stream.numel(), length, what)
        count = stream.numel() // length
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
        return self.blocks[order].long()

    def _permutation(self, epoch: int, seed: int) -> torch.Tensor:
        key = (epoch, seed)
        if getattr(self, "_cached", (None, None))[0] != key:
            generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
            self._cached = (key, torch.randperm(len(self), generator=generator))
        return self._cached[1]


class DocumentBlocks(TokenBlocks):
    """Rows of documents that are kept apart.

    Args:
        rows: `[N, 2, length]` of ids and labels, `IGNORED` where a document begins and at padding.
    """

    apart = True

    def __init__(self, rows: torch.Tensor, length: int) -> None:
        self.blocks, self.length = rows, length


def mixture(parts: list[tuple[TokenBlocks, float]], count: int) -> TokenBlocks:
    """About `count` blocks of several sources, in proportion to their shares; short sources are repeated.

    Args:
        parts: blocks of one length, each with its share of the whole.
    """
    chosen = []
    for blocks, share in parts:
        wanted = max(1, round(count * share))
        chosen.append(blocks.blocks.repeat(math.ceil(wanted / len(blocks)), *[1] * (blocks.blocks.dim() - 1))[:wanted])
    first = parts[0][0]
    together = torch.cat(chosen)
    return DocumentBlocks(together, first.length) if first.apart else TokenBlocks(together.flatten(), first.length)
