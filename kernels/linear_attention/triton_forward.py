"""Linear attention on the GPU: the forward pass.

With no decay or one per token, one scan computes the scores of a chunk itself, so q, k and v are read once and only the
output is written. With a decay per channel, or values too wide for that, `prepare` first writes what does not depend on
the values. Few heads and long sequences are cut into segments.

Bounds per token and head in 16 bits: without `prepare` it moves 2·(2K + 2V) bytes and does about 4·C·K + 4·K·V
operations, so on an H200 it is bound by memory bandwidth up to K = V = 128.

Suffixes: B batch, N sequences, T time, H heads, K key width, V value width, C chunk length, S segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.linear_attention.triton_common import Packing, per_channel
from linearize.kernels.linear_attention.triton_prepare import prepare
from linearize.kernels.linear_attention.triton_scan import scan
from linearize.kernels.linear_attention.triton_segments import cuts, segment_states


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    bonus: Tensor | None,
    scale: float,
    start: Tensor | None,
    packing: Packing,
    want_end: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, final state and, if the sequences were cut, the states [N,H,S,K,V] that segments start from.

    q, k, v share a dtype and are dense in their last dimension; g is float32, [B or 1, T, H] or [B, T, H, K].
    """
    B, T, H, K = q.shape
    V = v.shape[3]
    o = torch.empty(B, T, H, V, dtype=v.dtype, device=v.device)
    end = torch.empty(packing.sequences, H, K, V, dtype=torch.float32, device=v.device) if want_end else None
    decay: dict[str, Any] = {} if g is None else {"log_decay": g}
    scores = None
    if bonus is not None or (g is not None and g.dim() == 4):
        q, k, scores, total = prepare(packing, q, k, per_channel(g, q), bonus, scale)
        decay, scale = {"total": total}, 1.0
    count = cuts(packing.sequences, T, H, K, V, q, packing.varlen)
    if count == 1:
        scan(packing, q, k, v, out=o, scores=scores, start=start, end=end, scale=scale, **decay)
        return o, end, None
    states = segment_states(packing, k, v, segments=count, start=start, end=end, **decay)
    scan(packing, q, k, v, out=o, scores=scores, start=states, segments=count, scale=scale, **decay)
    return o, end, states
