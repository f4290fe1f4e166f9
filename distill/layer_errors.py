"""How far every mixer is from the attention that it replaces, now: measured after surgery and again after training."""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch

from linearize.convert.layer_stream import LayerStream, run_block
from linearize.convert.mixers import Mixer
from linearize.convert.surgery import student_mixers
from linearize.convert.surgery_error import error_and_size
from linearize.distill.capture import Seen, watch, watch_attention
from linearize.distill.progress import meter
from linearize.distill.reference import Reference


@torch.no_grad()
def layer_errors(reference: Reference, ids: torch.Tensor, name: str = "layer errors") -> list[float | None]:
    """`‖mine - teacher's‖ / ‖teacher's‖` of every layer's attention, after its output projection.

    Each mixer reads what the teacher's attention read, so that no layer sees another's mistakes; unlike
    `surgery_error` the teacher may stand beside a student that no longer holds it.

    Args:
        ids: `[N, T]`, one sequence is read at a time.

    Returns:
        One number per layer of the decoder; None where no mixer is.
    """
    student = reference.student
    training = student.training
    student.eval()
    mixers = student_mixers(student)
    sums = {mixer.layer_idx: torch.zeros(2, dtype=torch.float64) for mixer in mixers}
    with meter(name, len(ids)) as progress:
        for i, row in enumerate(ids):
            seen = watch_attention(reference, row[None].to(student.device))
            for mixer in mixers:
                sums[mixer.layer_idx] += _squares(mixer, seen[mixer.layer_idx])
            progress.update(i + 1, row.numel())
    student.train(training)
    return _relative(sums, student.config.num_hidden_layers)


@torch.no_grad()
def layer_errors_streamed(teacher: LayerStream, student: LayerStream, ids: torch.Tensor) -> list[float | None]:
    """`layer_errors` with one block of each model in memory, and the hidden states of `ids` `[N, T]`."""
    with teacher.surroundings():
        hidden, calls = zip(*(teacher.call(row[None]) for row in ids), strict=True)
    states, sums = list(hidden), {}
    with meter("layer errors", len(calls[0])) as progress:
        for index, call in enumerate(calls[0]):  # which hold for every sequence of this length
            with teacher.block(index) as block, student.block(index) as made, ExitStack() as stack:
                seen: list[Seen] = []
                watch(stack, getattr(block, teacher.attention_name), seen.append)
                entered, states = states, [run_block(block, state, call) for state in states]
                for sequence, state in zip(seen, entered, strict=True):
                    sequence.stream = state
                for mixer in student_mixers(made):
                    sums[index] = torch.stack([_squares(mixer, sequence) for sequence in seen]).sum(0)
            progress.update(index + 1, ids.numel())
    return _relative(sums, len(calls[0]))


def _squares(mixer: Mixer, seen: Seen) -> torch.Tensor:
    """Of what the mixer makes of what the attention saw, see `error_and_size`."""
    return error_and_size(mixer.output(seen.mix(mixer).to(seen.hidden_states.dtype)), seen.output)


def _relative(sums: dict[int, torch.Tensor], layers: int) -> list[float | None]:
    found = {layer: math.sqrt(float(error / size.clamp_min(1e-12))) for layer, (error, size) in sums.items()}
    return [found.get(layer) for layer in range(layers)]
