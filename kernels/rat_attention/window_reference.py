"""The specification of RAT with a window: one softmax per token, in any float dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype


def rat_window_attention_reference(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    keys_BNGK: Tensor,
    values_BNGK: Tensor,
    offset_H: Tensor,
    *,
    window: int,
    chunk_size: int,
    origin_B: Tensor | None = None,
    reach: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Output [B,T,H,K]; arguments as `rat_window_attention`."""
    (B, T, H, K), S = q_BTHK.shape, k_BSGK.shape[1]
    dtype = compute_dtype(q_BTHK, k_BSGK, v_BSGK, keys_BNGK, values_BNGK, offset_H)
    scale = K**-0.5 if scale is None else scale
    q, offset = q_BTHK.to(dtype), offset_H.to(dtype)
    k, v, keys, values = (
        x.to(dtype).repeat_interleave(H // x.shape[2], 2) for x in (k_BSGK, v_BSGK, keys_BNGK, values_BNGK)
    )
    rows = []
    for b in range(B):
        origin = 0 if origin_B is None else int(origin_B[b])
        outputs = []
        for t in range(T):
            own = S - T + t
            position = own - origin
            if position < 0:
                outputs.append(0 * q[b, t])
                continue
            exact = max(0, position - window + 1 if window else position) // chunk_size * chunk_size
            nearest = exact if window else position
            farthest = 0 if reach is None else position - reach + 1
            exact_keys = [origin + p for p in range(max(nearest, farthest), position + 1)]
            seen = [n for n in range(exact // chunk_size) if (n + 1) * chunk_size - 1 >= farthest]
            near = torch.einsum("hk,shk->hs", q[b, t], k[b, exact_keys]) * scale
            far = torch.einsum("hk,shk->hs", q[b, t], keys[b, seen]) * scale
            if softcap is not None:
                near, far = (softcap * torch.tanh(x / softcap) for x in (near, far))
            p = torch.cat([near, far + offset[:, None]], 1).softmax(1)
            outputs.append(torch.einsum("hs,shk->hk", p, torch.cat([v[b, exact_keys], values[b, seen]])))
        rows.append(torch.stack(outputs) if outputs else q[b])
    return (torch.stack(rows) if rows else q).to(v_BSGK.dtype)
