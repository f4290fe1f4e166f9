"""A teacher's likeliest next tokens on disk, so that it need not be in memory while the student learns from it.

Per predicted position the log-probabilities of the k likeliest tokens and that of all the others together. A row is
found by its token ids, whatever order the data comes in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from linearize.convert.errors import ConversionError
from linearize.distill.objectives import over_slices
from linearize.distill.progress import meter
from linearize.distill.reference import Head, Reference, last_hidden

_ROWS_PER_FILE = 256
_INDEX = "index.json"


def row_key(row: torch.Tensor) -> str:
    """Name of a row of token ids `[T]`."""
    return hashlib.sha256(row.cpu().contiguous().to(torch.int64).numpy().tobytes()).hexdigest()[:32]


def top_k_log_probs(hidden: torch.Tensor, head: Head, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities `[N, k]`, their tokens `[N, k]` int32, and that of the rest `[N]`; hidden `[N, D]`."""

    def function(logits: torch.Tensor) -> torch.Tensor:
        log_p = logits.log_softmax(-1)
        values, tokens = log_p.topk(k, -1)
        rest = log_p.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([values.double(), tokens.double(), rest.double()], -1)

    found = over_slices(hidden, head, function)
    return found[:, :k].float(), found[:, k : 2 * k].int(), found[:, -1].float()


def write_cache(folder: Path, batches: Iterator[torch.Tensor], reference: Reference, k: int, total: int) -> None:
    """Run the teacher over batches of ids `[B, T]`; rows that are there already are left out.

    Killed and called again it goes on after the last whole file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = _read_index(folder, k)
    pending: dict[str, torch.Tensor] = {}
    with meter("teacher's logits", total) as progress:
        for i, batch in enumerate(batches):
            for row in batch:
                if (key := row_key(row)) not in written and key not in pending:
                    pending[key] = row
            if len(pending) >= _ROWS_PER_FILE or i + 1 == total:
                _write_file(folder, pending, reference, k, written)
                pending = {}
            progress.update(i + 1, batch.numel())


def _read_index(folder: Path, k: int) -> dict[str, str]:
    file = folder / _INDEX
    if not file.is_file():
        return {}
    index = json.loads(file.read_text())
    if index["top_k"] != k:
        raise ConversionError(f"{folder} holds the {index['top_k']} likeliest tokens, not {k}; give another folder")
    return index["rows"]


@torch.no_grad()
def _write_file(
    folder: Path, rows: dict[str, torch.Tensor], reference: Reference, k: int, written: dict[str, str]
) -> None:
    if not rows:
        return
    tensors: dict[str, torch.Tensor] = {}
    with reference.model() as teacher:
        for key, row in rows.items():
            hidden = last_hidden(teacher, row[None].to(teacher.device))[0, :-1]
            values, tokens, rest = top_k_log_probs(hidden, Head.of(teacher), k)
            tensors |= {f"{key}.log_probs": values, f"{key}.tokens": tokens, f"{key}.rest": rest}
    name = f"{len(written):08d}.safetensors"
    save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, folder / f"{name}.tmp")
    (folder / f"{name}.tmp").replace(folder / name)
    written |= dict.fromkeys(rows, name)
    temporary = folder / (_INDEX + ".tmp")
    temporary.write_text(json.dumps({"top_k": k, "rows": written}))
    temporary.replace(folder / _INDEX)


class CachedLogits:
    """Reads what `write_cache` wrote."""

    def __init__(self, folder: Path, k: int) -> None:
        self.folder, self.rows = folder, _read_index(folder, k)
        self.files: dict[str, Any] = {}

    def __call__(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids `[B, T]` -> log-probabilities `[B (T-1), k]`, tokens `[B (T-1), k]`, log-probability of the rest.

        Raises:
            ConversionError: a row is not in the cache.
        """
        parts: list[list[torch.Tensor]] = [[], [], []]
        for row in input_ids:
            key = row_key(row)
            if key not in self.rows:
                raise ConversionError(f"{self.folder} has no logits for this text; write the cache with the same data")
            name = self.rows[key]
            if name not in self.files:
                self.files[name] = safe_open(self.folder / name, framework="pt")
            for part, field in zip(parts, ("log_probs", "tokens", "rest"), strict=True):
                part.append(self.files[name].get_tensor(f"{key}.{field}"))
        values, tokens, rest = (torch.cat(part).to(input_ids.device) for part in parts)
        return values, tokens.long(), rest


def cached_kl(
    hidden: torch.Tensor, head: Head, log_probs: torch.Tensor, tokens: torch.Tensor, rest: torch.Tensor
) -> torch.Tensor:
    """KL(teacher ‖ student) of distributions over the k tokens and "any other", the mean over tokens, in nats.

    A lower bound of the KL over the vocabulary, equal to it where k is the vocabulary.

    Args:
        hidden: `[N, D]` of the student, and its head.
        log_probs, tokens, rest: `[N, k]`, `[N, k]`, `[N]` of the teacher.
    """

    def function(
        logits: torch.Tensor, log_probs: torch.Tensor, tokens: torch.Tensor, rest: torch.Tensor
    ) -> torch.Tensor:
        log_q = logits.log_softmax(-1)
        kl = (log_probs.exp() * (log_probs - log_q.gather(-1, tokens))).sum(-1)
        if tokens.shape[-1] < logits.shape[-1]:
            other = log_q.scatter(-1, tokens, -torch.inf).logsumexp(-1)
            kl = kl + rest.exp() * (rest - other)
        return kl

    return over_slices(hidden, head, function, log_probs, tokens, rest).mean()
