"""How much of its state a recurrence uses: effective rank, and how long what it stored stays there.

Both are measured on real text, on the student's own activations, and ask nothing of a mixer but `mix`.

Effective rank of a head's state matrix with singular values σ is `exp(-Σ p_i log p_i)`, p = σ / Σ σ (Roy and
Vetterli, 2007): 1 when one direction holds everything, at most the smaller side of the matrix.

Half-life: two copies of a mixer read the same further tokens, one from the state that the text so far left, one from
an empty matrix. Where the update is linear in the state, as all of the package's are, the difference of their states
is exactly what is left of the old one, whatever the decay depends on and whether or not a delta rule erases. The
half-life is the number of tokens after which its Frobenius norm is half of what it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from linearize.convert.cache import State
from linearize.convert.calibration import routed
from linearize.convert.mixers import Mixer
from linearize.convert.surgery import student_mixers

MATRICES = ("memory", "slot_keys")
"""Names of the tensors that hold matrices, by which mixers' states are read."""

UNDECAYED = 1 - 1e-4
"""A state that keeps more than this over the whole stretch has no measurable half-life."""


@dataclass(frozen=True)
class LayerState:
    """One recurrent layer.

    Attributes:
        tensor: the state's name inside the mixer.
        shape: rows and columns of a head's matrix.
        rank: effective rank per head, the mean over sequences.
        half_life: tokens per head, the median over sequences; None where nothing measurable is forgotten.
    """

    layer: int
    tensor: str
    shape: tuple[int, int]
    rank: list[float]
    half_life: list[float | None]


@dataclass(frozen=True)
class StateUse:
    """All recurrent layers after reading `tokens` tokens; half-lives over the `stretch` tokens that follow."""

    layers: list[LayerState]
    tokens: int
    stretch: int
    sequences: int


def effective_rank(matrices: torch.Tensor) -> torch.Tensor:
    """Effective rank `[...]` of matrices `[..., K, V]`, float32; 0 for a zero matrix."""
    values = torch.linalg.svdvals(matrices.float())
    p = values / values.sum(-1, keepdim=True).clamp_min(1e-30)
    entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
    return torch.where(values.sum(-1) > 0, entropy.exp(), 0)


def half_life(kept: list[float], after: list[int]) -> float | None:
    """Tokens until half is left, from the shares `kept[i]` left after `after[i]` tokens.

    Between two points the decay is taken as exponential; beyond the last it goes on at its mean rate so far.
    """
    previous_kept, previous = 1.0, 0
    for share, tokens in zip(kept, after, strict=True):
        if share <= 0.5:
            rate = (math.log(previous_kept) - math.log(max(share, 1e-30))) / (tokens - previous)
            return previous + (math.log(previous_kept) + math.log(2)) / rate
        previous_kept, previous = share, tokens
    if previous_kept > UNDECAYED:
        return None
    return previous * math.log(2) / -math.log(previous_kept)


def state_use(student: PreTrainedModel, ids: torch.Tensor, stretch: int = 512) -> StateUse | None:
    """Measure on sequences `[N, T]`; the first `T - stretch` tokens fill the state. None without recurrent layers.

    Args:
        stretch: tokens over which forgetting is watched; at most half of T.
    """
    mixers = [m for m in student_mixers(student) if m.recurrent]
    stretch = min(stretch, ids.shape[1] // 2)
    fill = ids.shape[1] - stretch
    found: dict[int, list[tuple[str, torch.Tensor, list[list[float]]]]] = {}

    def route(mixer: Mixer, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        seen = _watch(mixer, hidden_states, kwargs.get("position_embeddings"), fill)
        if seen is not None:
            found.setdefault(mixer.layer_idx, []).append(seen)
        return mixer.attend(hidden_states, **kwargs)

    with torch.no_grad(), routed(mixers, route):
        for row in ids:
            student.get_decoder()(input_ids=row[None].to(student.device), use_cache=False)
    if not found:
        return None
    after = _checkpoints(stretch)
    layers = []
    for layer, sequences in sorted(found.items()):
        name, matrix, _ = sequences[0]
        rank = torch.stack([effective_rank(m) for _, m, _ in sequences]).mean(0)
        lives = [[half_life(head, after) for head in kept] for _, _, kept in sequences]
        heads = [_median([sequence[h] for sequence in lives]) for h in range(len(lives[0]))]
        layers.append(LayerState(layer, name, (matrix.shape[-2], matrix.shape[-1]), rank.tolist(), heads))
    return StateUse(layers, fill, stretch, len(ids))


def _watch(
    mixer: Mixer, hidden_states: torch.Tensor, rope: Any, fill: int
) -> tuple[str, torch.Tensor, list[list[float]]] | None:
    """The state's name, its matrices `[H, K, V]` after `fill` tokens, and per head the shares kept later."""

    def mix(start: int, end: int, state: State | None) -> State:
        part = None if rope is None else tuple(x[:, start:end] for x in rope)
        own = None if state is None else {n: t.clone() for n, t in state.items()}  # a single token updates it in place
        return mixer.mix(hidden_states[:, start:end], part, None, own)[1]

    full = mix(0, fill, None)
    name = matrix_name(full)
    if name is None:
        return None
    empty = {**full, name: torch.zeros_like(full[name])}
    matrix = full[name][0]
    norm = matrix.float().norm(dim=(-2, -1)).clamp_min(1e-30)
    unit = _log_unit(full)
    kept, start = [], fill
    for end in (fill + n for n in _checkpoints(hidden_states.shape[1] - fill)):
        full, empty = mix(start, end, full), mix(start, end, empty)
        left = (full[name] - empty[name])[0].float().norm(dim=(-2, -1))
        grown = torch.as_tensor(_log_unit(full) - unit).exp()
        kept.append((left * grown / norm).tolist())
        start = end
    return name, matrix.cpu(), [list(head) for head in zip(*kept, strict=True)]


def matrix_name(state: State) -> str | None:
    """The tensor of a state that holds one matrix per head `[B, H, K, V]`; None for states of another kind."""
    return next((name for name in MATRICES if name in state and state[name].dim() == 4), None)


def _log_unit(state: State) -> torch.Tensor | float:
    """Logarithm `[H]` of what the matrices are kept in units of (mLSTM's running maximum), else 0."""
    return state["maximum"][0].float() if "maximum" in state else 0.0


def _checkpoints(stretch: int) -> list[int]:
    """1, 2, 4, ... and `stretch`."""
    points = [2**i for i in range(stretch.bit_length()) if 2**i < stretch]
    return [*points, stretch]


def _median(values: list[float | None]) -> float | None:
    """The middle one (the lower of two); None counts as longer than everything."""
    ordered = sorted(math.inf if value is None else value for value in values)
    middle = ordered[(len(ordered) - 1) // 2]
    return None if math.isinf(middle) else middle
