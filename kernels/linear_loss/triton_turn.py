"""A chunk's products turned into losses and, in place, into gradients, by one kernel.

A program takes a token's row of products through the vocabulary twice (three times for the reverse divergence, whose
gradient needs its value): once for the log-sum-exps, kept with a running maximum, and once for the divergence and the
gradient, which is written where the student's products stood.

Bound: memory. Per token and entry the student's product is read twice and its gradient written once, the teacher's
read twice, and products themselves are written once by the matrix product before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.linear_loss.terms import Terms

BLOCK = 4096


@triton.jit
def _logits(ptr, v, ok, scale, softcap, CAPPED: tl.constexpr):
    """Logits in float32, -inf outside, and tanh of the capped ones."""
    z = scale * tl.load(ptr + v, mask=ok, other=0.0).to(tl.float32)
    bent = z
    if CAPPED:
        x = z / softcap
        e = tl.exp(-2.0 * tl.abs(x))
        bent = (1.0 - e) / (1.0 + e)
        bent = tl.where(x < 0, -bent, bent)
        z = softcap * bent
    return tl.where(ok, z, -float("inf")), bent


@triton.jit
def _turn(
    student_ptr,
    teacher_ptr,
    label_ptr,
    ce_ptr,
    kl_ptr,
    student_c,
    teacher_c,
    V,
    ce_weight,
    kl_weight,
    inverse_temperature,
    scale,
    softcap,
    ignore_index,
    TEACHER: tl.constexpr,
    LABELS: tl.constexpr,
    REVERSE: tl.constexpr,
    TEMPERED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """CE and KL of one token, and the gradient of its products; see the module's docstring."""
    c = tl.program_id(0).to(tl.int64)
    student_row = student_ptr + c * student_c
    teacher_row = teacher_ptr + c * teacher_c
    columns = tl.arange(0, BLOCK)
    label = -1
    weight = 1.0
    if LABELS:
        label = tl.load(label_ptr + c)
        weight = tl.where(label != ignore_index, 1.0, 0.0)
        label = tl.where(label != ignore_index, label, 0)

    # Log-sum-exps: of z, and of z and y over the temperature.
    top_z, sum_z, sum_r = -float("inf"), 0.0, 0.0
    top_y, sum_p = -float("inf"), 0.0
    for start in range(0, V, BLOCK):
        v = start + columns
        ok = v < V
        z, _ = _logits(student_row, v, ok, scale, softcap, CAPPED)
        new = tl.maximum(top_z, tl.max(z, 0))
        sum_z = sum_z * tl.exp(top_z - new) + tl.sum(tl.exp(z - new), 0)
        if TEMPERED:
            shrink = tl.exp((top_z - new) * inverse_temperature)
            sum_r = sum_r * shrink + tl.sum(tl.exp((z - new) * inverse_temperature), 0)
        top_z = new
        if TEACHER:
            y, _ = _logits(teacher_row, v, ok, scale, softcap, CAPPED)
            new = tl.maximum(top_y, tl.max(y, 0))
            shrink = tl.exp((top_y - new) * inverse_temperature)
            sum_p = sum_p * shrink + tl.sum(tl.exp((y - new) * inverse_temperature), 0)
            top_y = new
    log_sum_z = tl.log(sum_z)
    log_sum_r = log_sum_z
    if TEMPERED:
        log_sum_r = tl.log(sum_r)
    log_sum_p = 0.0
    if TEACHER:
        log_sum_p = tl.log(sum_p)

    if LABELS:  # before products are overwritten
        own, _own = _logits(student_row, label, label >= 0, scale, softcap, CAPPED)
        tl.store(ce_ptr + c, top_z + log_sum_z - own)
        tl.debug_barrier()

    kl = 0.0
    if TEACHER and REVERSE:
        for start in range(0, V, BLOCK):
            v = start + columns
            ok = v < V
            z, _ = _logits(student_row, v, ok, scale, softcap, CAPPED)
            y, _ = _logits(teacher_row, v, ok, scale, softcap, CAPPED)
            log_r = (z - top_z) * inverse_temperature - log_sum_r
            log_p = (y - top_y) * inverse_temperature - log_sum_p
            kl += tl.sum(tl.where(ok, tl.exp(log_r) * (log_r - log_p), 0.0), 0)
    FORWARD: tl.constexpr = TEACHER and not REVERSE
    if FORWARD or SLOPE:
        for start in range(0, V, BLOCK):
            v = start + columns
            ok = v < V
            z, bent = _logits(student_row, v, ok, scale, softcap, CAPPED)
            slope = tl.zeros([BLOCK], tl.float32)
            if TEACHER:
                y, _ = _logits(teacher_row, v, ok, scale, softcap, CAPPED)
                log_r = (z - top_z) * inverse_temperature - log_sum_r
                log_p = (y - top_y) * inverse_temperature - log_sum_p
                r = tl.exp(log_r)
                if REVERSE:
                    slope = kl_weight * inverse_temperature * r * (log_r - log_p - kl)
                else:
                    p = tl.exp(log_p)
                    kl += tl.sum(tl.where(ok, p * (log_p - log_r), 0.0), 0)
                    slope = kl_weight * inverse_temperature * (r - p)
            if LABELS:
                slope += ce_weight * (tl.exp(z - top_z - log_sum_z) - tl.where(v == label, 1.0, 0.0))
            if SLOPE:
                slope *= weight * scale
                if CAPPED:
                    slope *= 1.0 - bent * bent
                tl.store(student_row + v, slope.to(student_ptr.dtype.element_ty), mask=ok)
    if TEACHER:
        tl.store(kl_ptr + c, kl)


def turn(
    student_CV: Tensor,
    teacher_CV: Tensor | None,
    labels_C: Tensor | None,
    ce_C: Tensor,
    kl_C: Tensor,
    terms: Terms,
    want_slope: bool,
) -> None:
    """Same arguments and effect as `chunked.turn`."""
    C, V = student_CV.shape
    _turn[(C,)](
        student_CV,
        student_CV if teacher_CV is None else teacher_CV,
        student_CV if labels_C is None else labels_C,
        ce_C,
        kl_C,
        student_CV.stride(0),
        0 if teacher_CV is None else teacher_CV.stride(0),
        V,
        terms.ce_weight,
        terms.kl_weight,
        1 / terms.temperature,
        terms.scale,
        terms.softcap or 1.0,
        terms.ignore_index,
        TEACHER=teacher_CV is not None,
        LABELS=labels_C is not None,
        REVERSE=terms.reverse,
        TEMPERED=terms.temperature != 1,
        CAPPED=terms.softcap != 0,
        SLOPE=want_slope,
        BLOCK=min(BLOCK, triton.next_power_of_2(V)),
        num_warps=8,
    )
