"""One token of the delta rule: the state is updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend

_NAME = "delta_rule_step"
MAX_KEY_WIDTH = 1024  # of the Triton kernel


@torch.no_grad()
def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """One decoding step of `delta_rule`; no gradients.

    Args:
        q, k: [B, H, K], any float dtype; keys are used as given (mixers L2-normalise them).
        v: [B, H, V], any float dtype.
        beta: [B, H] writing strength.
        state: [B, H, K, V] float32 (or float64), any strides; overwritten with the state after this token.
        log_decay: None, [B, H] or [B, H, K], natural log, <= 0. Default: no decay.
        scale: multiplies the output. Default: `K ** -0.5`.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference" (one here).

    Returns:
        o: [B, H, V] in v's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it.
        RuntimeError: the backend asked for can't run here.

    Source: the recurrences of DeltaNet (arXiv:2406.06484), Gated DeltaNet (arXiv:2412.06464) and Kimi Delta
    Attention (arXiv:2510.26692).
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "H", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "H", "V"), dims)
    check_tensor(_NAME, "beta", beta, ("B", "H"), dims)
    check_tensor(_NAME, "state", state, ("B", "H", "K", "V"), dims)
    if log_decay is not None:
        shape = ("B", "H") if log_decay.dim() == 2 else ("B", "H", "K")
        check_tensor(_NAME, "log_decay", log_decay, shape, dims)
    tensors = {"q": q, "k": k, "v": v, "beta": beta, "state": state, "log_decay": log_decay}
    check_float(_NAME, tensors)
    check_same_device(_NAME, tensors)
    if state.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{_NAME}: state has dtype {state.dtype}; keep it in float32")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=_no_kernel_for(q, state))
    if chosen == "triton":
        from linearize.kernels.delta_rule.triton_decode import step

        return step(q, k, v, beta, state, log_decay, scale)
    return _step(q, k, v, beta, state, log_decay, scale)


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
    beta_BH: Tensor,
    state_BHKV: Tensor,
    log_decay: Tensor | None,
    scale: float,
) -> Tensor:
    dtype = state_BHKV.dtype
    q, k, v, beta = (x.to(dtype) for x in (q_BHK, k_BHK, v_BHV, beta_BH))
    if log_decay is not None:
        state_BHKV.mul_(log_decay.to(dtype).exp().reshape(*log_decay.shape[:2], -1, 1))
    error = v - torch.matmul(k[:, :, None], state_BHKV)[:, :, 0]
    state_BHKV.addcmul_((beta[..., None] * k)[..., None], error[..., None, :])
    return (torch.matmul(q[:, :, None], state_BHKV)[:, :, 0] * scale).to(v_BHV.dtype)
