"""Tokens of a text on disk, so that no run tokenises it twice; read back through the file, not into memory.

Files lie in `$XDG_CACHE_HOME/linearize/tokens` (`~/.cache/...`), one per tokenizer, text and number of tokens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

WORTH_KEEPING = 2**16
"""Fewer tokens are not kept."""


def cache_folder() -> Path:
    """Where tokens are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linearize" / "tokens"


def fingerprint(tokenizer: Any) -> str:
    """Changes with everything that decides a tokenizer's output."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    marks = (type(tokenizer).__name__, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return hashlib.sha256(f"{described}{marks}".encode()).hexdigest()


def text_hash(documents: Iterable[str]) -> str:
    """Of the documents, in order, with their borders."""
    found = hashlib.sha256()
    for document in documents:
        encoded = document.encode("utf-8", "surrogatepass")
        found.update(len(encoded).to_bytes(8, "little") + encoded)
    return found.hexdigest()


def cached(
    key: str, make: Callable[[], dict[str, torch.Tensor]], size: Callable[[Any], int]
) -> dict[str, torch.Tensor]:
    """The tensors of `make()`, from disk if they were made before.

    Args:
        size: of what was made, in tokens.
    """
    file = cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.safetensors"
    if not file.is_file():
        made = make()
        if size(made) < WORTH_KEEPING:
            return made
        temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file(made, temporary)
            os.replace(temporary, file)
        except OSError:  # a full or read-only disk costs the cache, not the run
            temporary.unlink(missing_ok=True)
            return made
    with safe_open(file, framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
