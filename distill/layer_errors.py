"""How far every mixer is from the attention that it replaces, now: measured after surgery and again after training."""

from __future__ import annotations

import math

import torch

from linearize.convert.surgery import student_mixers
from linearize.distill.capture import watch_attention
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
                call = seen[mixer.layer_idx]
                heads, _ = mixer.mix(call.hidden_states, call.rope, None, None, call.cu_seqlens)
                mine, target = mixer.output(heads.to(call.hidden_states.dtype)).double(), call.output.double()
                pair = torch.stack([(mine - target).square().sum(), target.square().sum()])
                sums[mixer.layer_idx] += pair.cpu()
            progress.update(i + 1, row.numel())
    student.train(training)
    found = {layer: math.sqrt(float(error / size.clamp_min(1e-12))) for layer, (error, size) in sums.items()}
    return [found.get(layer) for layer in range(student.config.num_hidden_layers)]
