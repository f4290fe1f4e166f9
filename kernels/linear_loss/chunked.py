"""A chunk's products turned into losses and, in place, into gradients, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.linear_loss.terms import Terms

_SLICE_ELEMENTS = 2**18
"""Elements per slice: its float32 copies stay in a CPU's cache."""


def turn(
    student_CV: Tensor,
    teacher_CV: Tensor | None,
    labels_C: Tensor | None,
    ce_C: Tensor,
    kl_C: Tensor,
    terms: Terms,
    want_slope: bool,
) -> None:
    """Write each token's CE and KL and, if wanted, d loss / d product over the student's products.

    Rows of ignored tokens get a gradient of zero; their CE and KL are not to be read.
    """
    rows = max(1, _SLICE_ELEMENTS // student_CV.shape[1])
    for start in range(0, student_CV.shape[0], rows):
        part = slice(start, start + rows)
        z, rise = terms.logits(student_CV[part])
        y = None if teacher_CV is None else terms.logits(teacher_CV[part])[0]
        labels = None if labels_C is None else labels_C[part]
        slope = _losses(z, y, labels, ce_C[part], kl_C[part], terms, want_slope)
        if want_slope:
            student_CV[part] = slope if rise is None else slope.mul_(rise)


def _losses(
    z: Tensor, y: Tensor | None, labels: Tensor | None, ce: Tensor, kl: Tensor, terms: Terms, want_slope: bool
) -> Tensor:
    """Writes ce and kl; returns d loss / d z, or anything unless it is wanted."""
    tempered = terms.temperature != 1
    log_q = z.log_softmax(-1) if labels is not None or not tempered else z
    weight_q = 0.0  # of softmax(z) in the gradient
    slope: Tensor | None = None
    if y is not None:
        log_p = (y / terms.temperature if tempered else y).log_softmax(-1)
        log_r = (z / terms.temperature).log_softmax(-1) if tempered else log_q
        weight = terms.kl_weight / terms.temperature
        if terms.reverse:
            r, log_ratio = log_r.exp(), log_r - log_p
            torch.linalg.vecdot(r, log_ratio, out=kl)
            slope = r.mul_(log_ratio.sub_(kl[:, None])).mul_(weight)
        else:
            p = log_p.exp()
            torch.linalg.vecdot(p, log_p.sub_(log_r), out=kl)
            slope = p.mul_(-weight)
            if tempered:
                slope.add_(log_r.exp_(), alpha=weight)
            else:
                weight_q = weight
    if labels is not None:
        counted = labels != terms.ignore_index
        index = labels.where(counted, 0)[:, None]
        ce.copy_(log_q.gather(-1, index)[:, 0]).neg_()
        weight_q += terms.ce_weight
    if not want_slope:
        return z
    if weight_q:
        q = log_q.exp_()
        slope = q.mul_(weight_q) if slope is None else slope.add_(q, alpha=weight_q)
    if slope is None:  # labels of weight 0 alone
        slope = torch.zeros_like(z)
    if labels is not None:
        slope.scatter_add_(-1, index, torch.full_like(slope[:, :1], -terms.ce_weight))
        if slope.device.type != "cpu" or not bool(counted.all()):
            slope.masked_fill_(~counted[:, None], 0)
    return slope
