"""Linear attention with no, a constant, a scalar or a vector decay."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import (
    check_cu_seqlens,
    check_float,
    check_log_decay_sign,
    check_same_device,
    check_tensor,
)
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.linear_attention.chunked import linear_attention_chunked
from linearize.kernels.linear_attention.decode import linear_attention_step
from linearize.kernels.linear_attention.reference import linear_attention_reference

__all__ = ["linear_attention", "linear_attention_step"]

_NAME = "linear_attention"
MAX_KEY_WIDTH = 256  # of the Triton kernels


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    bonus: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Causal linear attention: `S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_tᵀ`, `o_t = scale · S_tᵀ q_t`.

    Differentiable (once) in every tensor. Computed in float32, or float64 if an input has it.

    Args:
        q, k: [B, T, H, K], any float dtype, any strides; T may be 0.
        v: [B, T, H, V], any float dtype.
        log_decay: natural logarithm of the decay, <= 0, kept in float32: None (no decay), [H] (one number
            per head), [B, T, H] (per token and head) or [B, T, H, K] (per key channel). Default: None.
        bonus: [H, K] or None: RWKV-6's u. The output then reads the state before the step plus the weighted
            step, `o_t = scale · (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ q_t`. Default: None.
        scale: multiplies the output. Default: `K ** -0.5`.
        initial_state: [B, H, K, V] state before the first token ([N, H, K, V] with `cu_seqlens`).
            Default: zeros.
        output_final_state: whether to return the state after the last token. Default: False.
        cu_seqlens: [N + 1] int32 or int64, cumulative lengths [0, n1, n1+n2, ..., T] of N sequences packed
            along time; then B must be 1, and a sequence may be empty. Default: None.
        backend: "auto" (Triton on CUDA, else chunked torch), "triton", "chunked" or "reference" (a loop).

    Returns:
        o: [B, T, H, V] in v's dtype.
        state: [B, H, K, V] (with `cu_seqlens` [N, H, K, V]) in float32, or float64 if an input is float64;
            None unless `output_final_state`.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape, device or (on the CPU) sign; the
            message names the argument and the fix.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: Katharopoulos et al. 2020 (arXiv:2006.16236); decays: RetNet (arXiv:2307.08621), Mamba-2
    (arXiv:2405.21060), GLA (arXiv:2312.06635); bonus: RWKV-6 (arXiv:2404.05892).
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "T", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "T", "H", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "T", "H", "V"), dims)
    if log_decay is not None:
        ranks: dict[int, tuple[str, ...]] = {1: ("H",), 3: ("B", "T", "H")}
        check_tensor(_NAME, "log_decay", log_decay, ranks.get(log_decay.dim(), ("B", "T", "H", "K")), dims)
    if bonus is not None:
        check_tensor(_NAME, "bonus", bonus, ("H", "K"), dims)
    states = dims["B"]
    if cu_seqlens is not None:
        states = check_cu_seqlens(_NAME, cu_seqlens, dims["B"], dims["T"])
    if initial_state is not None:
        check_tensor(_NAME, "initial_state", initial_state, (states, dims["H"], dims["K"], dims["V"]), {})
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "bonus": bonus, "initial_state": initial_state}
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "cu_seqlens": cu_seqlens})
    if log_decay is not None:
        check_log_decay_sign(_NAME, log_decay)
    unsupported = _no_kernel_for(q, k, v, initial_state)
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=unsupported)
    if chosen == "triton" and v.numel() > 0 and q.numel() > 0:
        from linearize.kernels.linear_attention.triton_op import linear_attention_triton

        return linear_attention_triton(
            q,
            k,
            v,
            log_decay,
            bonus_HK=bonus,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )
    run = linear_attention_reference if chosen == "reference" else linear_attention_chunked
    o, state = run(
        q,
        k,
        v,
        log_decay,
        bonus_HK=bonus,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    return o, state if output_final_state else None


def _no_kernel_for(*tensors: Tensor | None) -> str | None:
    """Why these tensors have no Triton kernel, or None if they have one."""
    if any(x is not None and x.dtype == torch.float64 for x in tensors):
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    q = tensors[0]
    if q is not None and q.shape[-1] > MAX_KEY_WIDTH:
        return f"the Triton kernels take keys up to K={MAX_KEY_WIDTH}, not {q.shape[-1]}"
    return None
