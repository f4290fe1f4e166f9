"""One token of gated slot attention: the slots are updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.linear_attention import linear_attention_step
from linearize.kernels.slot_attention.reference import Slots

_NAME = "slot_attention_step"


@torch.no_grad()
def slot_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    log_decay: Tensor,
    state: Slots,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """One decoding step of `slot_attention`; no gradients.

    Args:
        q, k: [B, H, K], any float dtype.
        v: [B, H, V], any float dtype.
        s, log_decay: [B, H, M], any float dtype; log decays are natural logs, <= 0.
        state: keys [B, H, M, K] and values [B, H, M, V], float32 (or float64), any strides; both overwritten with
            the slots after this token.
        scale: multiplies the logits. Default: `K ** -0.5`.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference" (one here).

    Returns:
        o: [B, H, V] in v's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it.
        RuntimeError: the backend asked for can't run here.

    Source: Gated Slot Attention (arXiv:2409.07146).
    """
    dims: dict[str, int] = {}
    keys, values = state
    check_tensor(_NAME, "q", q, ("B", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "H", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "H", "V"), dims)
    check_tensor(_NAME, "s", s, ("B", "H", "M"), dims)
    check_tensor(_NAME, "log_decay", log_decay, ("B", "H", "M"), dims)
    check_tensor(_NAME, "state's keys", keys, ("B", "H", "M", "K"), dims)
    check_tensor(_NAME, "state's values", values, ("B", "H", "M", "V"), dims)
    tensors = {"q": q, "k": k, "v": v, "s": s, "log_decay": log_decay}
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "state's keys": keys, "state's values": values})
    for name, slots in (("keys", keys), ("values", values)):
        if slots.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{_NAME}: state's {name} have dtype {slots.dtype}; keep them in float32")
    # The keys' own reading by rows is not wanted: any query does.
    linear_attention_step(s, s, k, keys, log_decay, scale=1.0, backend=backend)
    logits_BHM = torch.matmul(keys, q.to(keys.dtype)[..., None])[..., 0]
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return linear_attention_step((scale * logits_BHM).softmax(-1), s, v, values, log_decay, scale=1.0, backend=backend)
