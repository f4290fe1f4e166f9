"""The losses from whole logits, differentiated by torch: the specification."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.kernels.linear_loss.terms import Terms, wide_dtype


def linear_loss_reference(
    student: tuple[Tensor, Tensor, Tensor | None],
    teacher: tuple[Tensor, Tensor, Tensor | None] | None,
    labels_N: Tensor | None,
    terms: Terms,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over the counted tokens: of the loss, of CE and of KL; and their number.

    student, teacher: hidden states [N, D], weight [vocab, D] and bias [vocab] or None of a head.
    """
    z, _ = terms.logits(F.linear(*student))
    zero = z.new_zeros(z.shape[0], dtype=wide_dtype(z.dtype))
    counted = torch.ones_like(zero, dtype=torch.bool)
    ce = kl = zero
    if labels_N is not None:
        counted = labels_N != terms.ignore_index
        ce = -z.log_softmax(-1).gather(-1, labels_N.where(counted, 0)[:, None])[:, 0]
    if teacher is not None:
        with torch.no_grad():
            y, _ = terms.logits(F.linear(*teacher))
            log_p = (y / terms.temperature).log_softmax(-1)
        log_q = (z / terms.temperature).log_softmax(-1)
        ahead, behind = (log_q, log_p) if terms.reverse else (log_p, log_q)
        kl = (ahead.exp() * (ahead - behind)).sum(-1)
    ce_sum, kl_sum = ((x * counted).sum() for x in (ce, kl))
    return terms.ce_weight * ce_sum + terms.kl_weight * kl_sum, ce_sum, kl_sum, counted.sum().to(zero.dtype)
