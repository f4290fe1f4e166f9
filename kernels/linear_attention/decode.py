"""One token of linear attention: the state is updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend

_NAME = "linear_attention_step"
MAX_KEY_WIDTH = 1024  # of the Triton kernel


@torch.no_grad()
def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    bonus: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """One decoding step of `linear_attention`; no gradients.

    Args:
        q, k: [B, H, K], any float dtype.
        v: [B, H, V], any float dtype.
        state: [B, H, K, V] float32 (or float64), any strides; overwritten with the state after this token.
        log_decay: None, [H], [B, H] or [B, H, K], natural log, <= 0. Default: no decay.
        bonus: [H, K] or None: RWKV-6's u; the output then reads `S_{t-1} + diag(u) k vᵀ`.
        scale: multiplies the output. Default: `K ** -0.5`.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference" (one here).

    Returns:
        o: [B, H, V] in v's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it.
        RuntimeError: the backend asked for can't run here.

    Source: the recurrences of Katharopoulos et al. 2020 (arXiv:2006.16236), GLA (arXiv:2312.06635) and RWKV-6
    (arXiv:2404.05892).
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "H", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "H", "V"), dims)
    check_tensor(_NAME, "state", state, ("B", "H", "K", "V"), dims)
    if log_decay is not None:
        shape = {1: ("H",), 2: ("B", "H")}.get(log_decay.dim(), ("B", "H", "K"))
        check_tensor(_NAME, "log_decay", log_decay, shape, dims)
    if bonus is not None:
        check_tensor(_NAME, "bonus", bonus, ("H", "K"), dims)
    tensors = {"q": q, "k": k, "v": v, "state": state, "log_decay": log_decay, "bonus": bonus}
    check_float(_NAME, tensors)
    check_same_device(_NAME, tensors)
    if state.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{_NAME}: state has dtype {state.dtype}; keep it in float32")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=_no_kernel_for(q, state))
    if chosen == "triton":
        from linearize.kernels.linear_attention.triton_decode import step

        return step(q, k, v, state, log_decay, bonus, scale)
    return _step(q, k, v, state, log_decay, bonus, scale)


def _no_kernel_for(q: Tensor, state: Tensor) -> str | None:
    if state.dtype != torch.float32:
        return f"the Triton kernel keeps the state in float32, not {state.dtype}"
    if q.shape[-1] > MAX_KEY_WIDTH:
        return f"the Triton kernel takes keys up to K={MAX_KEY_WIDTH}, not {q.shape[-1]}"
    return None


def _step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    state_BHKV: Tensor,
    log_decay: Tensor | None,
    bonus_HK: Tensor | None,
    scale: float,
) -> Tensor:
    dtype = state_BHKV.dtype
    q, k, v = q_BHK.to(dtype), k_BHK.to(dtype), v_BHV.to(dtype)
    # o reads the updated state, or with a bonus the state before plus (q·(u ⊙ k)) v.
    if bonus_HK is not None:
        o = torch.matmul(q[:, :, None], state_BHKV)[:, :, 0] + (q * bonus_HK.to(dtype) * k).sum(-1, keepdim=True) * v
    if log_decay is not None:
        decay = log_decay.to(dtype).exp()
        decay = decay[None, :, None] if decay.dim() == 1 else decay
        state_BHKV.mul_(decay[..., None] if decay.dim() == 3 else decay[..., None, None])
    state_BHKV.addcmul_(k[..., None], v[..., None, :])
    if bonus_HK is None:
        o = torch.matmul(q[:, :, None], state_BHKV)[:, :, 0]
    return (o * scale).to(v_BHV.dtype)
