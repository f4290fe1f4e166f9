"""One step of the gated scan: the state is updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.gated_scan.arguments import check_chunk_size, check_gate, check_position

_NAME = "gated_scan_step"


@torch.no_grad()
def gated_scan_step(
    x: Tensor,
    gate: Tensor,
    state: Tensor,
    chunk_size: int | None = None,
    *,
    position: int | Tensor = 0,
) -> Tensor:
    """One decoding step of `gated_scan`; no gradients.

    Args:
        x: [B, D] or [B, H, D], any float dtype.
        gate: x's shape, in [0, 1], any float dtype.
        state: x's shape, float32 (or float64), any strides; overwritten with the state after this step.
        chunk_size: the state is reset before every step whose position is a multiple of it, a power of two.
            Default: never.
        position: how many steps came before this one: an int, or [B] integers. Default: 0.

    Returns:
        y: x's shape and dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape, device or value; the message names
            it.

    Source: HGRN (arXiv:2311.04823), RAT (arXiv:2507.04416).
    """
    dims: dict[str, int] = {}
    shape = ("B", "H", "D") if isinstance(x, Tensor) and x.dim() == 3 else ("B", "D")
    for name, value in (("x", x), ("gate", gate), ("state", state)):
        check_tensor(_NAME, name, value, shape, dims)
    check_float(_NAME, {"x": x, "gate": gate, "state": state})
    check_same_device(_NAME, {"x": x, "gate": gate, "state": state})
    if state.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{_NAME}: state has dtype {state.dtype}; keep it in float32")
    check_gate(_NAME, gate)
    check_chunk_size(_NAME, chunk_size)
    check_position(_NAME, position, dims["B"], x.device)
    if chunk_size is not None:
        if isinstance(position, Tensor):
            state.masked_fill_((position % chunk_size == 0).view(-1, *(1,) * (x.dim() - 1)), 0.0)
        elif position % chunk_size == 0:
            state.zero_()
    state.copy_(torch.lerp(x.to(state.dtype), state, gate.to(state.dtype)))
    return state.to(x.dtype, copy=True)
