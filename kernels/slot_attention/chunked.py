"""Gated slot attention as two passes of linear attention with a decay per channel, in chunks or by Triton.

Both passes hold a state whose rows are slots and decay: in linear attention's terms the key is s. The second pass
reads it as linear attention does, by rows: `o_t = Ṽ_tᵀ p_t`. The first reads it by columns, `K̃_t q_t`, which is the
gradient that linear attention gives to its query:

    linear attention of (x, s, k):   o_t = K̃_tᵀ x_t
    for any x, ∂(Σ_t o_t · q_t)/∂x_t = K̃_t q_t

so the forward pass is that gradient, and the backward pass is one forward and backward pass of linear attention at
x = the gradient of the logits: o is then q's gradient, and those of s, k, decay and state are the ones wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.linear_attention import linear_attention
from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.slot_attention.reference import Slots


def slot_attention_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    s_BTHM: Tensor,
    log_decay_BTHM: Tensor,
    *,
    scale: float,
    initial_state: Slots | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "chunked",
) -> tuple[Tensor, Slots]:
    """Same arguments and results as `slot_attention_reference`; `backend` is linear attention's."""
    wide = compute_dtype(q_BTHK, k_BTHK, v_BTHV, s_BTHM, log_decay_BTHM, *(initial_state or ()))
    dtype = v_BTHV.dtype if backend == "triton" else wide  # Triton's products read one dtype
    q, k, v, s = (x.to(dtype) for x in (q_BTHK, k_BTHK, v_BTHV, s_BTHM))
    first_keys, first_values = initial_state or (None, None)
    logits_BTHM, keys = _ReadColumns.apply(q, k, s, log_decay_BTHM, first_keys, cu_seqlens, backend)
    weights_BTHM = (scale * logits_BTHM.to(wide)).softmax(-1)
    o_BTHV, values = linear_attention(
        weights_BTHM.to(dtype),
        s,
        v,
        log_decay_BTHM,
        scale=1.0,
        initial_state=first_values,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    assert values is not None
    return o_BTHV.to(v_BTHV.dtype), (keys, values)


class _ReadColumns(torch.autograd.Function):
    """`K̃_t q_t` [B,T,H,M] in the dtype of q, k and s, and the last `K̃`; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        s: Tensor,
        log_decay: Tensor,
        start: Tensor | None,
        cu_seqlens: Tensor | None,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, s, log_decay, start, cu_seqlens)
        ctx.backend = backend
        x = torch.zeros_like(s).requires_grad_()
        with torch.enable_grad():
            o, keys = _linear_attention(x, k, s, log_decay, start, cu_seqlens, backend)
        (logits,) = torch.autograd.grad(o, x, q)
        return logits, keys.detach()

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor, dkeys: Tensor) -> tuple[Tensor | None, ...]:
        q, k, s, log_decay, start, cu_seqlens = ctx.saved_tensors
        leaf_k, leaf_s, leaf_g = (x.detach().requires_grad_() for x in (k, s, log_decay))
        leaf_start = None if start is None else start.detach().requires_grad_()
        with torch.enable_grad():
            o, keys = _linear_attention(dlogits, leaf_k, leaf_s, leaf_g, leaf_start, cu_seqlens, ctx.backend)
        given = [x for x in (leaf_k, leaf_s, leaf_g, leaf_start) if x is not None]
        # A single first token does not use its decay.
        gradients = torch.autograd.grad((o, keys), given, (q, dkeys), allow_unused=True)
        return o.detach(), *gradients, *[None] * (6 - len(gradients))


def _linear_attention(
    x: Tensor,
    k: Tensor,
    s: Tensor,
    log_decay: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    o, keys = linear_attention(
        x,
        s,
        k,
        log_decay,
        scale=1.0,
        initial_state=start,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    assert keys is not None
    return o, keys
