"""Few heads and long sequences: cut into segments that are scanned side by side.

Once for their states, each from zero; `_join_segments` makes of these the states that segments start from; then, from
there, for the outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.linear_attention import launch as table
from linearize.kernels.linear_attention.launch import CHUNK
from linearize.kernels.linear_attention.triton_common import Packing
from linearize.kernels.linear_attention.triton_scan import scan


@triton.jit(do_not_specialize=["segments", "H"])
def _join_segments(
    states_ptr,
    decay_ptr,
    start_ptr,
    end_ptr,
    segments,
    H,
    s_n,
    s_h,
    s_k,
    s_v,
    start_scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    END: tl.constexpr,
):
    """Turn the states [N,H,S,K,V] that segments end with, each from zero, into those that they start from."""
    spot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    nh = tl.program_id(1).to(tl.int64)
    ok = spot < K * V
    ik = spot // V
    iv = spot % V
    if START:
        source = start_ptr + (nh // H) * s_n + (nh % H) * s_h + ik * s_k + iv * s_v
        state = tl.load(source, mask=ok, other=0.0).to(tl.float32) * start_scale
    else:
        state = tl.zeros([BLOCK], tl.float32)
    for i in range(0, segments):
        segment = segments - 1 - i if REVERSE else i
        here = states_ptr + (nh * segments + segment) * (K * V) + spot
        gained = tl.load(here, mask=ok, other=0.0)
        tl.store(here, state, mask=ok)
        if DECAY:
            state = state * tl.load(decay_ptr + (nh * segments + segment) * K + ik, mask=ok, other=0.0)
        state += gained
    if END:
        tl.store(end_ptr + nh * (K * V) + spot, state, mask=ok)


def segment_states(
    packing: Packing,
    b: Tensor,
    c: Tensor,
    *,
    segments: int,
    log_decay: Tensor | None = None,
    total: Tensor | None = None,
    start: Tensor | None = None,
    end: Tensor | None = None,
    reverse: bool = False,
    start_scale: float = 1.0,
) -> Tensor:
    """The state [N,H,S,K,V] that each segment starts from, by a scan of every segment from zero; fills "
    "`end`."""
    N, H, K, V = packing.sequences, b.shape[2], b.shape[3], c.shape[3]
    states = torch.empty(N, H, segments, K, V, dtype=torch.float32, device=b.device)
    decayed = log_decay is not None or total is not None
    decay = torch.empty(N, H, segments, K, dtype=torch.float32, device=b.device) if decayed else None
    scan(packing, b, b, c, log_decay=log_decay, total=total, end=states, kept=decay, reverse=reverse, segments=segments)
    block = 1024
    _join_segments[(triton.cdiv(K * V, block), N * H)](
        states,
        decay,
        start,
        end,
        segments,
        H,
        *((0, 0, 0, 0) if start is None else start.stride()),
        start_scale,
        K=K,
        V=V,
        BLOCK=block,
        DECAY=decayed,
        REVERSE=reverse,
        START=start is not None,
        END=end is not None,
        num_warps=4,
    )
    return states


def cuts(sequences: int, T: int, H: int, K: int, V: int, q: Tensor, varlen: bool) -> int:
    """How many segments each sequence is cut into; packed sequences are left whole."""
    if varlen:
        return 1
    blocks = -(-V // table.scan_launch(K, V, q.dtype.itemsize).block)
    return table.segments(sequences * H * blocks, -(-T // CHUNK), q.device)
