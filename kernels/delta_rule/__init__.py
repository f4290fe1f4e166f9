"""The delta rule with no, a scalar or a vector decay: DeltaNet, Gated DeltaNet, Kimi Delta Attention."""

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
from linearize.kernels.delta_rule.chunked import delta_rule_chunked
from linearize.kernels.delta_rule.decode import delta_rule_step
from linearize.kernels.delta_rule.reference import delta_rule_reference
from linearize.kernels.dispatch import resolve_backend

__all__ = ["delta_rule", "delta_rule_step"]

_NAME = "delta_rule"
MAX_KEY_WIDTH = 256  # of the Triton kernels


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Delta rule: `S_t = A_t S_{t-1} + β_t k_t (v_t − (A_t S_{t-1})ᵀ k_t)ᵀ`, `o_t = scale · S_tᵀ q_t`.

    `A_t` is 1, `exp(log_decay_t)` or `diag(exp(log_decay_t))`. Each step replaces, by the fraction `β_t |k_t|²`,
    what the state recalls under `k_t` by `v_t`; it is stable while `0 <= β_t |k_t|² <= 2`. Differentiable (once)
    in every tensor. Computed in float32, or float64 if an input has it.

    Args:
        q, k: [B, T, H, K], any float dtype, any strides; T may be 0. Used as given: mixers L2-normalise keys.
        v: [B, T, H, V], any float dtype.
        beta: [B, T, H] writing strength, usually in (0, 1), or (0, 2) to allow negative eigenvalues.
        log_decay: natural logarithm of the decay, <= 0, kept in float32: None (no decay), [B, T, H] (per
            token and head) or [B, T, H, K] (per key channel). Default: None.
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

    Source: DeltaNet, chunked by Yang et al. 2024 (arXiv:2406.06484); scalar decay: Gated DeltaNet
    (arXiv:2412.06464); vector decay: Kimi Delta Attention (arXiv:2510.26692).
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "T", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "T", "H", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "T", "H", "V"), dims)
    check_tensor(_NAME, "beta", beta, ("B", "T", "H"), dims)
    if log_decay is not None:
        shape = ("B", "T", "H") if log_decay.dim() == 3 else ("B", "T", "H", "K")
        check_tensor(_NAME, "log_decay", log_decay, shape, dims)
    states = dims["B"]
    if cu_seqlens is not None:
        states = check_cu_seqlens(_NAME, cu_seqlens, dims["B"], dims["T"])
    if initial_state is not None:
        check_tensor(_NAME, "initial_state", initial_state, (states, dims["H"], dims["K"], dims["V"]), {})
    tensors = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "initial_state": initial_state}
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "cu_seqlens": cu_seqlens})
    if log_decay is not None:
        check_log_decay_sign(_NAME, log_decay)
    unsupported = _no_kernel_for(q, k, v, beta, initial_state)
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=unsupported)
    if chosen == "triton" and v.numel() > 0 and q.numel() > 0:
        from linearize.kernels.delta_rule.triton_autograd import delta_rule_triton

        return delta_rule_triton(
            q,
            k,
            v,
            beta,
            log_decay,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )
    run = delta_rule_reference if chosen == "reference" else delta_rule_chunked
    o, state = run(q, k, v, beta, log_decay, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return o, state if output_final_state else None


def _no_kernel_for(*tensors: Tensor | None) -> str | None:
    """Why these tensors have no Triton kernel, or None if they have one."""
    if any(x is not None and x.dtype == torch.float64 for x in tensors):
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    q = tensors[0]
    if q is not None and q.shape[-1] > MAX_KEY_WIDTH:
        return f"the Triton kernels take keys up to K={MAX_KEY_WIDTH}, not {q.shape[-1]}"
    return None
