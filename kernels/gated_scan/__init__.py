"""Gated running means: an elementwise recurrence over time, reset every few steps or never."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import check_cu_seqlens, check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.gated_scan.arguments import check_chunk_size, check_gate, check_position
from linearize.kernels.gated_scan.chunked import gated_scan_chunked
from linearize.kernels.gated_scan.decode import gated_scan_step
from linearize.kernels.gated_scan.reference import gated_scan_reference

__all__ = ["gated_scan", "gated_scan_step"]

_NAME = "gated_scan"


def gated_scan(
    x: Tensor,
    gate: Tensor,
    chunk_size: int | None = None,
    *,
    position: int | Tensor = 0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated running mean: `y_t = g_t ⊙ y_{t-1} + (1 − g_t) ⊙ x_t`, with `y_{t-1} = 0` where a chunk starts.

    Differentiable (once) in x, gate and the initial state. Computed in float32, or float64 if an input has
    it.

    Args:
        x: [B, T, D] or [B, T, H, D], any float dtype, any strides; T may be 0.
        gate: x's shape, or [B, T, Hg, D] with Hg dividing H, whose heads serve H / Hg consecutive ones of x; in
            [0, 1], any float dtype: how much of the state before is kept.
        chunk_size: a chunk starts at every position that is a multiple of it, a power of two. Default: never.
        position: of the first step, an int >= 0 or [B] integers ([N] with `cu_seqlens`): how many steps of
            the sequence came before. Only read with `chunk_size`. Default: 0.
        initial_state: [B, D] or [B, H, D], the state before the first step ([N, ...] with `cu_seqlens`). Not
            read where the first step starts a chunk. Default: zeros.
        output_final_state: whether to return the state after the last step. Default: False.
        cu_seqlens: [N + 1] int32 or int64, cumulative lengths [0, n1, n1+n2, ..., T] of N sequences packed
            along time, read by the host; then B must be 1, and a sequence may be empty. Default: None.
        backend: "auto" (Triton on CUDA, else blocks in plain torch), "triton", "chunked" or "reference" (a
            loop).

    Returns:
        y: x's shape and dtype.
        state: [B, D] or [B, H, D] (with `cu_seqlens` [N, ...]) in float32, or float64 if an input is
            float64; None unless `output_final_state`.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape, device or (on the CPU) value; the
            message names the argument and the fix.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: HGRN (arXiv:2311.04823); with chunks, RAT (arXiv:2507.04416).
    """
    dims: dict[str, int] = {}
    shape = ("B", "T", "H", "D") if isinstance(x, Tensor) and x.dim() == 4 else ("B", "T", "D")
    check_tensor(_NAME, "x", x, shape, dims)
    check_tensor(_NAME, "gate", gate, tuple("Hg" if name == "H" else name for name in shape), dims)
    if dims.get("H", 0) % max(1, dims.get("Hg", 1)):
        raise ValueError(f"{_NAME}: gate has {dims['Hg']} heads and x {dims['H']}; x's must be a multiple of gate's")
    states = dims["B"]
    if cu_seqlens is not None:
        states = check_cu_seqlens(_NAME, cu_seqlens, dims["B"], dims["T"])
    if initial_state is not None:
        check_tensor(_NAME, "initial_state", initial_state, (states, *x.shape[2:]), {})
    tensors = {"x": x, "gate": gate, "initial_state": initial_state}
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "cu_seqlens": cu_seqlens})
    check_gate(_NAME, gate)
    check_chunk_size(_NAME, chunk_size)
    check_position(_NAME, position, states, x.device)
    unsupported = _no_kernel_for(cu_seqlens, x, gate, initial_state)
    chosen = resolve_backend(backend, x.device, operation=_NAME, unsupported=unsupported)
    if chosen == "triton" and x.numel() > 0:
        from linearize.kernels.gated_scan.triton_op import gated_scan_triton

        return gated_scan_triton(
            x,
            gate,
            chunk_size,
            position=position,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )
    if gate.shape != x.shape:
        gate = gate.repeat_interleave(x.shape[2] // gate.shape[2], dim=2)
    run = gated_scan_reference if chosen == "reference" else gated_scan_chunked
    y, state = run(x, gate, chunk_size, position=position, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return y, state if output_final_state else None


def _no_kernel_for(cu_seqlens: Tensor | None, *tensors: Tensor | None) -> str | None:
    """Why this call has no Triton kernel, or None if it has one."""
    if any(x is not None and x.dtype == torch.float64 for x in tensors):
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    if cu_seqlens is not None:
        return "the Triton kernels take no cu_seqlens"
    return None
