"""Mixing matrices: what weight every earlier token has in a layer's output, of the student and of its teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from linearize.convert.calibration import CalibrationSample, attention_logits
from linearize.convert.errors import ConversionError
from linearize.convert.mixers import Mixer
from linearize.convert.mixers.base import MixerOptions, Rope
from linearize.convert.mixers.softmax import SoftmaxAttention

_LINEARITY = 1e-3  # how far, relatively, a linear mixer may be from linear in float32


@contextmanager
def _values(mixer: Mixer, values: torch.Tensor) -> Iterator[None]:
    """Context: the mixer mixes `values` `[B, T, H_kv, K]` instead of its own."""
    project = mixer.project
    mixer.__dict__["project"] = lambda hidden_states: (*project(hidden_states)[:2], values)
    try:
        yield
    finally:
        del mixer.__dict__["project"]


def mixing_matrix(mixer: Mixer, hidden_states: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """The student's mixing matrix `[B, H, T, T]`: row t holds the weights of tokens j ≤ t in the heads at t.

    Found by mixing one-hot values, a head's channels standing for as many tokens; for mixers that are linear in v.
    Where channels are gated apart, token j is read at channel j mod K.

    Args:
        hidden_states: `[B, T, D]`, the block's normalised input. T should be short: T / K passes, T² numbers.
    """
    batch, tokens = hidden_states.shape[:2]
    spec = mixer.spec
    columns = []
    for start in range(0, tokens, spec.head_dim):
        width = min(spec.head_dim, tokens - start)
        one_hot = hidden_states.new_zeros(tokens, spec.head_dim)
        one_hot[start : start + width, :width] = torch.eye(width, device=one_hot.device)
        with _values(mixer, one_hot[None, :, None].expand(batch, -1, spec.num_kv_heads, -1)):
            heads, _ = mixer.mix(hidden_states, rope, None, None)
        columns.append(heads[..., :width].float())
    return torch.cat(columns, -1).transpose(1, 2)


def teacher_matrix(mixer: Mixer, hidden_states: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """The teacher's attention weights `[B, H, T, T]` at this mixer's layer, float32, without gradient."""
    with torch.no_grad():
        softmax = SoftmaxAttention(mixer.spec, mixer.attention, mixer.layer_idx, MixerOptions())
        sample = CalibrationSample(hidden_states, rope, hidden_states)
        return attention_logits(softmax, sample).softmax(-1)


@torch.no_grad()
def check_linear(mixer: Mixer) -> None:
    """Raise `ConversionError` if the mixer's heads are not linear in its values."""
    spec = mixer.spec
    weight = next(mixer.parameters())
    if weight.is_meta:  # no numbers to compare
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, spec.hidden_size, generator=generator).to(weight)
    a, b = torch.randn(2, 1, 4, spec.num_kv_heads, spec.head_dim, generator=generator).to(weight)
    angles = torch.zeros(1, 4, spec.head_dim, device=weight.device, dtype=weight.dtype)
    mixed = []
    for values in (a, b, a + b):
        with _values(mixer, values):
            mixed.append(mixer.mix(x, (angles.cos(), angles.sin()), None, None)[0].float())
    error = (mixed[0] + mixed[1] - mixed[2]).norm() / mixed[2].norm().clamp_min(1e-12)
    limit = _LINEARITY if weight.dtype == torch.float32 else 0.05
    if error > limit:
        raise ConversionError(
            f"mixer {mixer.name!r} has no mixing matrix: its output is not linear in its values "
            f"(a norm or an activation stands behind them); leave out the matrix stage and `weights`"
        )
