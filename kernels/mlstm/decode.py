"""One token of mLSTM: the state is updated in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.linear_attention import linear_attention_step
from linearize.kernels.mlstm.reference import MLSTMState, normalised

_NAME = "mlstm_step"


@torch.no_grad()
def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMState,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """One decoding step of `mlstm`; no gradients.

    Args:
        q, k: [B, H, K], any float dtype.
        v: [B, H, V], any float dtype.
        i, f: [B, H] gates before their exponential and sigmoid.
        state: m [B, H], C [B, H, K, V] and n [B, H, K], float32 (or float64), any strides; all overwritten with
            the state after this token.
        scale: multiplies q. Default: `K ** -0.5`.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference" (one here).

    Returns:
        o: [B, H, V] in v's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it.
        RuntimeError: the backend asked for can't run here.

    Source: xLSTM (arXiv:2405.04517), equations 19 to 27.
    """
    dims: dict[str, int] = {}
    m, C, n = state
    check_tensor(_NAME, "q", q, ("B", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "H", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "H", "V"), dims)
    check_tensor(_NAME, "i", i, ("B", "H"), dims)
    check_tensor(_NAME, "f", f, ("B", "H"), dims)
    check_tensor(_NAME, "state's m", m, ("B", "H"), dims)
    check_tensor(_NAME, "state's C", C, ("B", "H", "K", "V"), dims)
    check_tensor(_NAME, "state's n", n, ("B", "H", "K"), dims)
    tensors = {"q": q, "k": k, "v": v, "i": i, "f": f}
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "state's m": m, "state's C": C, "state's n": n})
    for name, x in (("m", m), ("C", C), ("n", n)):
        if x.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{_NAME}: state's {name} has dtype {x.dtype}; keep it in float32")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    dtype = C.dtype
    kept = F.logsigmoid(f.to(dtype)) + m
    d = i.to(dtype) - kept
    log_decay, written = -d.clamp_min(0), k.to(dtype) * d.clamp_max(0).exp()[..., None]
    m.copy_(torch.maximum(kept, i.to(dtype)))
    read = linear_attention_step(q, written, v.to(dtype), C, log_decay, scale=scale, backend=backend)
    n.mul_(log_decay.exp()[..., None]).add_(written)
    weight = scale * (n * q.to(dtype)).sum(-1)
    return normalised(read, weight, m).to(v.dtype)
