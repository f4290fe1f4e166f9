"""Packed sequences for the plain-torch kernels: groups of similar length become padded batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences of similar length out of a packed batch.

    Attributes:
        sequences: [n] which sequences these are.
        index: [n, L] packed position of each padded position (0 at padding).
        valid: [n, L] True where a real token stands.
    """

    sequences: Tensor
    index: Tensor
    valid: Tensor

    @property
    def full(self) -> bool:
        """Whether there is no padding at all."""
        return bool(self.valid.all())


def group_by_length(cu_seqlens: Tensor) -> list[SequenceGroup]:
    """Group the non-empty sequences so that padding a group never more than doubles its length.

    Grouping by powers of two keeps both the number of batches (a logarithm of the longest) and waste small.
    """
    device = cu_seqlens.device
    bounds = cu_seqlens.tolist()
    groups: dict[int, list[int]] = {}
    for i in range(len(bounds) - 1):
        length = bounds[i + 1] - bounds[i]
        if length > 0:
            groups.setdefault((length - 1).bit_length(), []).append(i)
    result = []
    for members in groups.values():
        sequences = torch.tensor(members, device=device)
        starts = torch.tensor([bounds[i] for i in members], device=device)
        lengths = torch.tensor([bounds[i + 1] - bounds[i] for i in members], device=device)
        offset = torch.arange(max(bounds[i + 1] - bounds[i] for i in members), device=device)
        valid = offset < lengths[:, None]
        result.append(SequenceGroup(sequences, torch.where(valid, starts[:, None] + offset, 0), valid))
    return result


def gather_group(x: Tensor, group: SequenceGroup) -> Tensor:
    """[1, T, ...] to the group's padded batch [n, L, ...], zeros at padding."""
    padded = x[0][group.index]
    if group.full:
        return padded
    return padded.masked_fill(~group.valid.view(*group.valid.shape, *(1,) * (padded.dim() - 2)), 0)
