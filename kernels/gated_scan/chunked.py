"""The gated scan in blocks, in plain torch: the CPU path, differentiable in every input.

Time is cut into blocks. All blocks take their steps side by side, then a short loop carries the state from
block to block, and each position adds what it still holds of the state its block starts from. Gates are only
ever multiplied, never divided by and never taken the logarithm of, so any gate in [0, 1] is exact. Blocks of
a scan that is reset every few steps need no carrying.

Shape suffixes: B batch, T time, D channels (all trailing dimensions), N blocks, L block length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.packing import gather_group, group_by_length

# Up to this length a chunk is one block, and no state is carried.
MAX_BLOCK = 64


def gated_scan_chunked(
    x: Tensor,
    gate: Tensor,
    chunk_size: int | None = None,
    *,
    position: int | Tensor = 0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `gated_scan_reference`."""
    dtype = compute_dtype(x, gate, initial_state)
    if cu_seqlens is not None:
        return _packed(x, gate, chunk_size, position, initial_state, cu_seqlens, dtype)
    B, _T = x.shape[:2]
    if x.numel() == 0:
        state = x.new_zeros(B, *x.shape[2:], dtype=dtype) if initial_state is None else initial_state.to(dtype)
        return x.clone(), state  # empty, but a part of x's graph
    y = scan_batch(x, gate, chunk_size, position, initial_state, dtype)
    return y.to(x.dtype), y[:, -1]


def scan_batch(
    x: Tensor,
    gate: Tensor,
    chunk_size: int | None,
    position: int | Tensor,
    initial_state: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y [B,T,...] in `dtype`, for T >= 1."""
    B, T = x.shape[:2]
    x_BTD, g_BTD = x.to(dtype).reshape(B, T, -1), gate.to(dtype).reshape(B, T, -1)
    state_BD = None if initial_state is None else initial_state.to(dtype).reshape(B, -1)
    if chunk_size is None:
        return _aligned(x_BTD, g_BTD, None, state_BD).view(x.shape)
    if isinstance(position, int):
        # Steps that change nothing (gate 1) bring the first token to its place in the chunk.
        lead = position % chunk_size
        if lead == 0:
            return _aligned(x_BTD, g_BTD, chunk_size, None).view(x.shape)
        x_BTD, g_BTD = F.pad(x_BTD, (0, 0, lead, 0)), F.pad(g_BTD, (0, 0, lead, 0), value=1.0)
        return _aligned(x_BTD, g_BTD, chunk_size, state_BD)[:, lead:].reshape(x.shape)

    # Every row has its own place in the chunk.
    lead_B1 = (position % chunk_size)[:, None]
    token = torch.arange(T + chunk_size - 1, device=x.device) - lead_B1
    outside = ((token < 0) | (token >= T))[..., None]
    index = token.clamp(0, T - 1)[..., None].expand(-1, -1, x_BTD.shape[-1])
    x_BTD = x_BTD.gather(1, index).masked_fill(outside, 0.0)
    g_BTD = g_BTD.gather(1, index).masked_fill(outside, 1.0)
    if state_BD is not None:
        state_BD = state_BD.masked_fill(lead_B1 == 0, 0.0)
    y = _aligned(x_BTD, g_BTD, chunk_size, state_BD)
    back = (torch.arange(T, device=x.device) + lead_B1)[..., None].expand(-1, -1, y.shape[-1])
    return y.gather(1, back).view(x.shape)


def _aligned(x_BTD: Tensor, g_BTD: Tensor, chunk_size: int | None, state_BD: Tensor | None) -> Tensor:
    """y [B,T,D] when the first token starts a chunk, whose state before it is `state_BD`."""
    B, T, D = x_BTD.shape
    # Blocks near sqrt(T): as many steps inside a block as blocks to carry over.
    L = 1 << max(3, ((T - 1).bit_length() + 1) // 2)
    if chunk_size is not None:
        L = chunk_size if chunk_size <= MAX_BLOCK else min(L, chunk_size)
    if T % L:
        x_BTD, g_BTD = (F.pad(t, (0, 0, 0, -T % L)) for t in (x_BTD, g_BTD))
    per_chunk = None if chunk_size is None else chunk_size // L
    y = _Scan.apply(x_BTD.view(B, -1, L, D), g_BTD.view(B, -1, L, D), state_BD, per_chunk)
    return y.view(B, -1, D)[:, :T]


class _Scan(torch.autograd.Function):
    """x, gate [B,N,L,D], the state [B,D] before the first block or None -> y [B,N,L,D].

    The state goes on from block to block and is reset every `per_chunk` blocks, or never (None).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, state: Tensor | None, per_chunk: int | None) -> Tensor:
        N, L = x.shape[1:3]
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.mul(x[:, :, 0], 1 - g[:, :, 0], out=y[:, :, 0])
        if state is not None:
            y[:, 0, 0].addcmul_(g[:, 0, 0], state)
        for i in range(1, L):
            torch.lerp(x[:, :, i], y[:, :, i - 1], g[:, :, i], out=y[:, :, i])
        if per_chunk != 1 and N > 1:
            held = g.cumprod(2)  # of the state before a block, at each of its positions
            for n in range(1, N):
                if per_chunk is None or n % per_chunk:
                    y[:, n].addcmul_(held[:, n], y[:, n - 1, -1:])
        ctx.save_for_backward(x, g, state, y)
        ctx.per_chunk = per_chunk
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, g, state, y = ctx.saved_tensors
        per_chunk: int | None = ctx.per_chunk
        N, L = x.shape[1:3]
        # e_t = dy_t + g_{t+1} e_{t+1}: the gradient of everything later with respect to y_t.
        e = torch.empty_like(y)
        e[:, :, -1] = dy[:, :, -1]
        for i in range(L - 2, -1, -1):
            torch.addcmul(dy[:, :, i], g[:, :, i + 1], e[:, :, i + 1], out=e[:, :, i])
        before = torch.zeros_like(y)
        before[:, :, 1:] = y[:, :, :-1]
        if state is not None:
            before[:, 0, 0] = state
        if per_chunk != 1 and N > 1:
            later = torch.ones_like(g)
            later[:, :, :-1] = g[:, :, 1:].flip(2).cumprod(2).flip(2)
            for n in range(N - 2, -1, -1):
                if per_chunk is None or (n + 1) % per_chunk:
                    e[:, n].addcmul_(later[:, n], (g[:, n + 1, :1] * e[:, n + 1, :1]))
                    before[:, n + 1, 0] = y[:, n, -1]
        dstate = None if state is None else g[:, 0, 0] * e[:, 0, 0]
        dg = before.sub_(x).mul_(e)
        return e.mul_(1 - g), dg, dstate, None


def _packed(
    x: Tensor,
    gate: Tensor,
    chunk_size: int | None,
    position: int | Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Sequences laid end to end: similar lengths go together as one batch, padded on the right."""
    N, inner = cu_seqlens.numel() - 1, x.shape[2:]
    final = x.new_zeros(N, *inner, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    if x.numel() == 0:
        return x.clone(), final
    y = x.new_zeros(x.shape[1:], dtype=dtype)
    for group in group_by_length(cu_seqlens):
        here = scan_batch(
            gather_group(x, group),
            gather_group(gate, group),
            chunk_size,
            position if isinstance(position, int) else position[group.sequences],
            None if initial_state is None else final[group.sequences],
            dtype,
        )
        y = y.index_put((group.index[group.valid],), here[group.valid])
        last = group.valid.sum(1) - 1
        final = final.index_copy(0, group.sequences, here[torch.arange(len(last), device=x.device), last])
    return y[None].to(x.dtype), final
