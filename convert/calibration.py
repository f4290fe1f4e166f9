"""Closed-form starts: what a few thousand tokens of the teacher say about a mixer's new tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from linearize.convert.mixers.base import Mixer, Rope


@dataclass(frozen=True)
class CalibrationSample:
    """One layer of the teacher at work.

    Attributes:
        hidden_states: `[B, T, D]` the attention's input.
        rope: cos and sin that came with it.
        heads: `[B, T, H, V]` the attention's output before its output projection.
    """

    hidden_states: torch.Tensor
    rope: Rope | None
    heads: torch.Tensor


@torch.no_grad()
def calibrate(student: PreTrainedModel, mixers: list[Mixer], input_ids: torch.Tensor) -> None:
    """Run the teacher over `input_ids` `[B, T]` once and let every mixer set its new tensors.

    The teacher's output goes on to the next layer, so each mixer sees what the teacher's attention saw.
    """
    with routed(mixers, calibration_route):
        student.get_decoder()(input_ids=input_ids, use_cache=False)


def calibration_route(mixer: Mixer, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Route that lets a mixer set its new tensors from what the teacher's attention does, and then goes on with it."""
    output, heads = teacher_heads(mixer, hidden_states, **kwargs)
    mixer.calibrate(CalibrationSample(hidden_states, kwargs.get("position_embeddings"), heads))
    return output, None


def teacher_heads(mixer: Mixer, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's attention at this layer: its output, and the heads `[B, T, H, V]` before the projection."""
    seen: list[torch.Tensor] = []
    projection = getattr(mixer.attention, mixer.spec.output_name)
    handle = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        output = mixer.attention(hidden_states, **kwargs)[0]
    finally:
        handle.remove()
    return output, seen[0].unflatten(-1, (mixer.spec.num_heads, -1))


@contextlib.contextmanager
def routed(mixers: Sequence[Any], route: Any) -> Iterator[None]:
    """Send the forward calls of mixers, or channel mixers, to `route` (see `Mixer.route`) inside the context."""
    before = [mixer.route for mixer in mixers]
    for mixer in mixers:
        mixer.__dict__["route"] = route
    try:
        yield
    finally:
        for mixer, previous in zip(mixers, before, strict=True):
            mixer.__dict__["route"] = previous


def teacher_route(mixer: Mixer, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Route that makes the student compute what the teacher does, over whole sequences (no cache)."""
    return mixer.attention(hidden_states, **{**kwargs, "past_key_values": None})[0], None


def least_squares(regressors: list[torch.Tensor], target: torch.Tensor, ridge: float = 1e-4) -> torch.Tensor:
    """Per head, the factors `c` that minimise `‖Σ_i c_i · regressor_i - target‖²`.

    Args:
        regressors: each `[B, T, H, V]`.
        target: `[B, T, H, V]`.
        ridge: added to the diagonal of the normal equations, relative to its mean.

    Returns:
        `[H, len(regressors)]` float32.
    """
    x = torch.stack([r.float() for r in regressors], -1)
    gram = torch.einsum("bthvi,bthvj->hij", x, x)
    moment = torch.einsum("bthvi,bthv->hi", x, target.float())
    diagonal = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-12)
    eye = torch.eye(x.shape[-1], device=x.device)
    return torch.linalg.solve(gram + ridge * diagonal * eye, moment)


def attention_logits(mixer: Mixer, sample: CalibrationSample) -> torch.Tensor:
    """The teacher's causal logits `[B, H, T, T]`, float32, -inf above the diagonal."""
    q, k, _ = mixer.project(sample.hidden_states)
    q, k = mixer.rotate(q, k, sample.rope)
    logits = torch.einsum("bthk,bshk->bhts", q.float(), mixer.expand(k).float()) * mixer.spec.scaling
    if mixer.spec.softcap is not None:
        logits = mixer.spec.softcap * torch.tanh(logits / mixer.spec.softcap)
    tokens = logits.shape[-1]
    distance = torch.arange(tokens, device=logits.device)[:, None] - torch.arange(tokens, device=logits.device)
    hidden = distance < 0
    if mixer.spec.sliding_window is not None:
        hidden |= distance >= mixer.spec.sliding_window
    return logits.masked_fill(hidden, -torch.inf)
