"""mLSTM: linear attention with exponential input gates, kept in range by a running maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import check_cu_seqlens, check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.mlstm.chunked import mlstm_chunked
from linearize.kernels.mlstm.decode import mlstm_step
from linearize.kernels.mlstm.reference import MLSTMState, mlstm_reference

__all__ = ["MLSTMState", "mlstm", "mlstm_step"]

_NAME = "mlstm"
MAX_KEY_WIDTH = 256  # of the Triton kernels


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    scale: float | None = None,
    initial_state: MLSTMState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, MLSTMState | None]:
    """Matrix LSTM with the stabilised exponential gating of xLSTM.

        m_t = max(logσ(f_t) + m_{t-1}, i_t)
        C_t = exp(logσ(f_t) + m_{t-1} − m_t) C_{t-1} + exp(i_t − m_t) k_t v_tᵀ,   n_t alike with k_t
        o_t = C_tᵀ q̂_t / max(|n_tᵀ q̂_t|, exp(−m_t)),   q̂ = scale · q

    The output does not depend on m, which only keeps exponents at most 0; so no gradient passes through m, and the
    gradient with respect to a state is the one at fixed m. Differentiable (once) in all other tensors. Computed in
    float32, or float64 if an input has it; with Triton and 16-bit inputs, numerator and denominator are rounded to
    16 bits.

    Args:
        q, k: [B, T, H, K], any float dtype, any strides; T may be 0.
        v: [B, T, H, V], any float dtype.
        i: [B, T, H] input gate before its exponential, finite.
        f: [B, T, H] forget gate before its sigmoid. `f = 1e4, i = -1e4` with k = 0 leaves the state untouched.
        scale: multiplies q. Default: `K ** -0.5`.
        initial_state: m [B, H], C [B, H, K, V] and n [B, H, K] before the first token (N instead of B with
            `cu_seqlens`). Default: zeros.
        output_final_state: whether to return the state after the last token. Default: False.
        cu_seqlens: [N + 1] int32 or int64, cumulative lengths [0, n1, n1+n2, ..., T] of N sequences packed
            along time; then B must be 1, and a sequence may be empty. Default: None.
        backend: "auto" (Triton on CUDA, else chunked torch), "triton", "chunked" or "reference" (a loop).

    Returns:
        o: [B, T, H, V] in v's dtype.
        state: (m, C, n) shaped as `initial_state`, float32, or float64 if an input is float64; None unless
            `output_final_state`.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names the
            argument and the fix.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: xLSTM (arXiv:2405.04517), equations 19 to 27 and appendix A.
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "T", "H", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "T", "H", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "T", "H", "V"), dims)
    check_tensor(_NAME, "i", i, ("B", "T", "H"), dims)
    check_tensor(_NAME, "f", f, ("B", "T", "H"), dims)
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "i": i, "f": f}
    states = dims["B"]
    if cu_seqlens is not None:
        states = check_cu_seqlens(_NAME, cu_seqlens, dims["B"], dims["T"])
    if initial_state is not None:
        H, K, V = dims["H"], dims["K"], dims["V"]
        shapes = ((states, H), (states, H, K, V), (states, H, K))
        for name, x, shape in zip(("m", "C", "n"), initial_state, shapes, strict=True):
            tensors[f"initial_state's {name}"] = check_tensor(_NAME, f"initial_state's {name}", x, shape, {})
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "cu_seqlens": cu_seqlens})
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=_no_kernel_for(dims["K"], tensors))
    scale = dims["K"] ** -0.5 if scale is None else float(scale)
    if chosen == "reference" or 0 in (dims["B"], dims["T"], dims["H"]):
        o, state = mlstm_reference(q, k, v, i, f, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    else:
        o, state = mlstm_chunked(
            q, k, v, i, f, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, backend=chosen
        )
    return o, state if output_final_state else None


def _no_kernel_for(K: int, tensors: dict[str, Tensor | None]) -> str | None:
    """Why this call has no Triton kernel, or None if it has one."""
    if any(x is not None and x.dtype == torch.float64 for x in tensors.values()):
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    if K > MAX_KEY_WIDTH:
        return f"the Triton kernels take keys up to K={MAX_KEY_WIDTH}, not {K}"
    return None
