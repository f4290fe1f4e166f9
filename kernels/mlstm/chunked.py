"""mLSTM as linear attention with a decay per token, in chunks or by Triton.

m comes first, from a scan: a step is `m -> max(m + logσ(f), i)`, and two steps in a row are again such a step,
`(f₁, i₁) then (f₂, i₂) = (f₁ + f₂, max(i₁ + f₂, i₂))`. With m known, C is linear attention with log decay
`logσ(f_t) + m_{t-1} − m_t` on keys `e^{i_t − m_t} k_t`, and n is one more column of it, whose value is always 1.

Since m is a maximum, the two exponents are `−max(d, 0)` and `min(d, 0)` of `d = i_t − logσ(f_t) − m_{t-1}`. So
computed they are never above 0, and one of them is exactly 0 whatever the rounding of m.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.kernels.linear_attention import linear_attention
from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.mlstm.reference import MLSTMState, normalised


def mlstm_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    i_BTH: Tensor,
    f_BTH: Tensor,
    *,
    scale: float,
    initial_state: MLSTMState | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "chunked",
) -> tuple[Tensor, MLSTMState]:
    """Same arguments and results as `mlstm_reference`; `backend` is linear attention's."""
    wide = compute_dtype(q_BTHK, k_BTHK, v_BTHV, i_BTH, f_BTH, *(initial_state or ()))
    dtype = v_BTHV.dtype if backend == "triton" else wide  # Triton's products read one dtype
    i, log_f = i_BTH.to(wide), F.logsigmoid(f_BTH.to(wide))
    first_m, start = None, None
    if initial_state is not None:
        first_m, C, n = initial_state
        start = torch.cat([C.to(wide), n.to(wide)[..., None]], -1)
    with torch.no_grad():
        before, m, last_m = running_maximum(i, log_f, first_m, cu_seqlens)
        d = i - log_f - before
    log_decay = _with_gradient_of(log_f, -d.clamp_min(0))
    written = k_BTHK.to(wide) * _with_gradient_of(i, d.clamp_max(0)).exp()[..., None]
    sums, state = linear_attention(
        q_BTHK.to(dtype),
        written.to(dtype),
        F.pad(v_BTHV.to(dtype), (0, 1), value=1.0),
        log_decay,
        scale=scale,
        initial_state=start,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    assert state is not None
    sums = sums.to(wide)
    o = normalised(sums[..., :-1], sums[..., -1], m)
    return o.to(v_BTHV.dtype), (last_m, state[..., :-1], state[..., -1])


def _with_gradient_of(source: Tensor, value: Tensor) -> Tensor:
    """`value` <= 0, with source's gradient (m shifts both by a constant); the rounded sum is at most 0 too."""
    return source + (value - source).detach()


def running_maximum(
    i_BTH: Tensor, log_f_BTH: Tensor, first_BH: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`m_{t-1}` and `m_t` [B,T,H] of every token, and the last m of every sequence [B or N, H]."""
    B, T, H = i_BTH.shape
    sequences = B if cu_seqlens is None else cu_seqlens.numel() - 1
    first = i_BTH.new_zeros(sequences, H) if first_BH is None else first_BH.to(i_BTH)
    if cu_seqlens is None:
        # The step of a sequence's first token forgets what came before it: its m is known.
        begins = torch.zeros(1, T, 1, dtype=torch.bool, device=i_BTH.device)
        begins[:, 0] = True
        start_BTH = first[:, None]
    else:
        bounds = cu_seqlens.to(i_BTH.device, torch.int64)
        index = torch.arange(T, device=i_BTH.device)
        own = torch.searchsorted(bounds, index, right=True) - 1
        begins = (index == bounds[own])[None, :, None]
        start_BTH = first[own][None]
    step = torch.where(begins, torch.maximum(log_f_BTH + start_BTH, i_BTH), i_BTH)
    decay = log_f_BTH.masked_fill(begins, -torch.inf)
    m = step
    lag = 1
    while lag < T:  # each token's step takes in the `lag` steps before it
        m = torch.cat([m[:, :lag], torch.maximum(m[:, lag:], decay[:, lag:] + m[:, :-lag])], 1)
        decay = torch.cat([decay[:, :lag], decay[:, lag:] + decay[:, :-lag]], 1)
        lag *= 2
    before = torch.where(begins, start_BTH, m.roll(1, 1))
    if cu_seqlens is None:
        return before, m, m[:, -1]
    last = torch.where((bounds[1:] > bounds[:-1])[:, None], m[0, (bounds[1:] - 1).clamp_min(0)], first)
    return before, m, last
