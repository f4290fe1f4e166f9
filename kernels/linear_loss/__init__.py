"""Cross-entropy and KL divergence from hidden states and the head, never holding the logits of all tokens."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.linear_loss.operator import Head, linear_loss_chunked
from linearize.kernels.linear_loss.reference import linear_loss_reference
from linearize.kernels.linear_loss.terms import Terms

__all__ = ["LinearLoss", "linear_cross_entropy", "linear_kl"]

Direction = Literal["forward", "reverse"]

_CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
"""Entries of a chunk's logits unless the caller says: enough tokens for the products to run at full rate."""


class LinearLoss(NamedTuple):
    """Means over the counted tokens, in nats, float32 (float64 for float64 inputs).

    Only `loss` is differentiable; the rest is for reports. `cross_entropy` is 0 without labels.
    """

    loss: Tensor
    cross_entropy: Tensor
    kl: Tensor
    tokens: Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Cross-entropy of `softcap · tanh(logit_scale · (hidden weightᵀ + bias) / softcap)` with labels, in nats.

    Differentiable (once) in hidden, weight and bias, each only if it requires a gradient. Products run in the dtype
    that hidden and weight share (under autocast, in its), softmax and sums in float32 (float64 if an input is).

    Memory beyond inputs and gradients: `chunk_size · vocab` elements of the products' dtype, and on a
    CPU a few times 2^18 elements of float32 (or one row of the vocabulary, if that is more). The gradient of hidden is
    held in hidden's dtype, those of weight and bias in float32.

    Args:
        hidden: [N, D] hidden states, any float dtype; N may be 0.
        weight: [vocab, D] of the head; converted as a whole if its dtype is another than hidden's.
        labels: [N] int64 tokens to predict, in [0, vocab), or `ignore_index`.
        bias: [vocab]. Default: None.
        softcap: > 0, bound of the logits. Default: None.
        logit_scale: factor of the logits before the cap. Default: 1.
        ignore_index: label of tokens that don't count. Default: -100.
        chunk_size: tokens whose logits are held at a time. Default: 2^23 / vocab on a CPU (32 MiB in float32),
            2^28 / vocab on a GPU (512 MiB in bfloat16).
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference" (whole logits).

    Returns:
        The mean over the counted tokens, a scalar in float32; 0 where none counts.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape, device or (on the CPU) value.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: gradients in the forward pass, chunk by chunk, as Liger Kernel (arXiv:2410.10989).
    """
    terms = Terms(1.0, 0.0, False, 1.0, float(logit_scale), float(softcap or 0), ignore_index)
    student = (hidden, weight, bias)
    return _loss("linear_cross_entropy", student, None, labels, terms, softcap, chunk_size, backend).loss


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    direction: Direction = "forward",
    temperature: float = 1.0,
    labels: Tensor | None = None,
    ce_weight: float = 0.0,
    kl_weight: float = 1.0,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> LinearLoss:
    """`ce_weight · CE + kl_weight · KL` of a student's next tokens, from hidden states and heads, in one pass.

    Forward is KL(teacher ‖ student), reverse KL(student ‖ teacher), both of softmax(logits / temperature); the usual
    factor temperature² is not applied. CE is at temperature 1. See `linear_cross_entropy` for logits, dtypes and
    memory, of which there is as much again for the teacher's products.

    Args:
        hidden, weight, bias: [N, D], [vocab, D] and [vocab], the student's; differentiable, once.
        teacher_hidden, teacher_weight, teacher_bias: [N, D'], [vocab, D'] and [vocab], constants here.
        direction: "forward" or "reverse". Default: "forward".
        temperature: > 0. Default: 1.
        labels: [N] int64. Where they are `ignore_index`, neither CE nor KL counts. Default: None, all count.
        ce_weight, kl_weight: weights in the loss. A CE of weight 0 is reported if there are labels. Default: 0, 1.
        softcap, logit_scale, ignore_index, chunk_size, backend: as in `linear_cross_entropy`; the first two hold
            for both heads.

    Returns:
        Loss, CE, KL and the number of counted tokens; see `LinearLoss`.

    Raises:
        TypeError, ValueError, RuntimeError: as `linear_cross_entropy`.
    """
    name = "linear_kl"
    if direction not in get_args(Direction):
        raise ValueError(f'{name}: direction is "{direction}"; use "forward" or "reverse"')
    if not temperature > 0:
        raise ValueError(f"{name}: temperature is {temperature}; it must be positive")
    if labels is None and ce_weight != 0:
        raise ValueError(f"{name}: ce_weight is {ce_weight} but there are no labels; pass labels, or ce_weight=0")
    reverse = direction == "reverse"
    weights = float(ce_weight), float(kl_weight)
    terms = Terms(*weights, reverse, float(temperature), float(logit_scale), float(softcap or 0), ignore_index)
    teacher = (teacher_hidden, teacher_weight, teacher_bias)
    return _loss(name, (hidden, weight, bias), teacher, labels, terms, softcap, chunk_size, backend)


def _loss(
    name: str,
    student: Head,
    teacher: Head | None,
    labels: Tensor | None,
    terms: Terms,
    softcap: float | None,
    chunk_size: int | None,
    backend: str,
) -> LinearLoss:
    _check(name, student, teacher, labels, terms.ignore_index)
    for option, value in (("softcap", softcap), ("chunk_size", chunk_size)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: {option} is {value}; it must be positive, or None")
    hidden, weight = student[:2]
    student = _alike(student)
    teacher = None if teacher is None else _alike((teacher[0].detach(), *teacher[1:]))
    wide = any(x is not None and x.dtype == torch.float64 for x in (*student, *(teacher or ())))
    unsupported = "the Triton kernel takes float16, bfloat16 and float32, not float64" if wide else None
    chosen = resolve_backend(backend, hidden.device, operation=name, unsupported=unsupported)
    if chosen == "reference":
        sums = linear_loss_reference(student, teacher, labels, terms)
    else:
        chunk = chunk_size or _even_chunk(hidden.shape[0], weight.shape[0], hidden.device.type)
        sums = linear_loss_chunked(student, teacher, labels, terms, chunk, triton=chosen == "triton")
    loss, ce, kl, tokens = sums
    over = tokens.clamp_min(1)
    return LinearLoss(loss / over, (ce / over).detach(), (kl / over).detach(), tokens)


def _check(name: str, student: Head, teacher: Head | None, labels: Tensor | None, ignore_index: int) -> None:
    dims: dict[str, int] = {}
    tensors: dict[str, Tensor | None] = {}
    for prefix, head in (("", student), ("teacher_", teacher)):
        if head is not None:
            width = f"{prefix}D"
            names = [prefix + part for part in ("hidden", "weight", "bias")]
            for part, value, shape in zip(names, head, (("N", width), ("vocab", width), ("vocab",)), strict=True):
                if value is not None:
                    tensors[part] = check_tensor(name, part, value, shape, dims)
    check_float(name, tensors)
    if labels is not None:
        check_tensor(name, "labels", labels, ("N",), dims)
        if labels.dtype != torch.int64:
            raise TypeError(f"{name}: labels has dtype {labels.dtype}; convert it to int64")
        if labels.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= dims["vocab"]))]
            if wrong.numel():
                raise ValueError(
                    f"{name}: labels has {int(wrong[0])}; it must lie in [0, {dims['vocab']}) or be {ignore_index}"
                )
    check_same_device(name, {**tensors, "labels": labels})


def _alike(head: Head) -> Head:
    """Hidden states, weight and bias in the dtype their product runs in."""
    hidden, weight, bias = head
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _even_chunk(tokens: int, vocab: int, device: str) -> int:
    """Tokens per chunk, the chunks about equally long."""
    most = max(1, _CHUNK_ELEMENTS["cpu" if device == "cpu" else "cuda"] // vocab)
    chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // chunks))
