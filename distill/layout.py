"""Documents side by side that do not see each other: how the body of a model is called on them.

Rows are laid end to end, `[1, B·T]`. The teacher tells documents by positions that begin anew, the student's mixers by
`cu_seq_lens_q`. A document begins wherever there is nothing to predict, so padding is documents of one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

IGNORED = -100
"""Label of tokens that do not count."""


@dataclass(frozen=True)
class Layout:
    """Borders of the documents in `[1, N]` tokens.

    Attributes:
        cu_seqlens: `[D + 1]` int32, where documents begin, and N.
        position_ids: `[1, N]`, from 0 in every document.
        real: `[N]`, False at padding.
    """

    cu_seqlens: torch.Tensor
    position_ids: torch.Tensor
    real: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        """For the body's forward."""
        longest = int(self.cu_seqlens.diff().max())
        return {
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
        }


_current: Layout | None = None


def arguments() -> dict[str, Any]:
    """What the body must be told about the documents of this batch; nothing where rows are running text."""
    return _current.arguments() if _current is not None else {}


def real_tokens(x: torch.Tensor) -> torch.Tensor:
    """`[B, T, ...]` without the padding."""
    return x if _current is None else x[:, _current.real]


@contextmanager
def apart(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Context: gives rows `[B, 2, T]` of ids and labels laid end to end, `[1, 2, B·T]`, and keeps their documents apart."""
    global _current
    ids, labels = (x.reshape(1, -1) for x in rows.unbind(1))
    starts = labels[0] == IGNORED
    starts[:: rows.shape[-1]] = True
    where = starts.nonzero()[:, 0]
    borders = torch.cat([where, where.new_tensor([ids.shape[1]])])
    position_ids = torch.arange(ids.shape[1], device=ids.device) - where[starts.cumsum(0) - 1]
    before, _current = _current, Layout(borders.int(), position_ids[None], (borders.diff() > 1)[starts.cumsum(0) - 1])
    try:
        yield torch.stack([ids, labels], 1)
    finally:
        _current = before


def token_ids(batch: torch.Tensor) -> torch.Tensor:
    """Token ids `[B, T]` of a batch of ids, or of ids and labels `[B, 2, T]`."""
    return batch if batch.dim() == 2 else batch[:, 0]
