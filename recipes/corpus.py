"""The text of a conversion: what the user names, or Python's standard library."""

from __future__ import annotations

import platform
from typing import Any

import torch

from linearize.distill.data import TokenBlocks, tokenize
from linearize.distill.reading import Corpus, Source, read_corpus
from linearize.recipes.python_corpus import documents, renamed


def open_corpus(data: Source, seed: int = 0, passages: int | None = None, streaming: bool = False) -> Corpus:
    """The corpus at `data`, or for None the standard library of this Python with half of its names changed.

    Args:
        passages: how many of the standard library's training passages are enough; None for all.
        streaming: see `read_corpus`.

    Raises:
        ConversionError: there is no such text.
    """
    if data is not None:
        return read_corpus(data, streaming)
    source = f"the standard library of Python {platform.python_version()}"
    return Corpus(source, renamed(documents("train", seed=seed)[:passages], seed), documents("heldout"))


def training_sample(
    data: Source, tokenizer: Any, tokens: int, context: int, longest: int, seed: int = 0
) -> torch.Tensor:
    """About `tokens` tokens of the training text, `[count, length]` ids; one sequence at least.

    Args:
        context: tokens per sequence; never more than `longest`, the teacher's own limit.
    """
    length = min(context, longest)
    corpus = open_corpus(data, seed)
    stream = tokenize(corpus.train, tokenizer, max(tokens, length))
    blocks = TokenBlocks(stream, length, f"the training text ({corpus.source})")
    return blocks.batch(0, max(1, tokens // length), seed)
