"""The specification: one normaliser over a softmax window and a linear rest, as a loop over queries and keys."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype

LARGEST_EXPONENT = 60.0  # e^±60 times the sums stays inside float32


def window_linear_attention_reference(
    q_BTHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    phi_q_BTHF: Tensor,
    phi_k_BPHF: Tensor,
    mix_H: Tensor,
    *,
    window: int,
    scale: float | None = None,
    softcap: float | None = None,
    shift: str = "window",
    key_mask_BS: Tensor | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Output and (memory, normaliser); arguments as `window_linear_attention`."""
    if cu_seqlens is not None:
        options: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap, "shift": shift}
        parts = []
        for a, b in itertools.pairwise(cu_seqlens.tolist()):
            q, k, v, phi_q, phi_k = (x[:, a:b] for x in (q_BTHK, k_BSHK, v_BSHV, phi_q_BTHF, phi_k_BPHF))
            parts.append(window_linear_attention_reference(q, k, v, phi_q, phi_k, mix_H, **options))
        memory, normaliser = (torch.cat([state[i] for _, state in parts]) for i in range(2))
        return torch.cat([o for o, _ in parts], 1), (memory, normaliser)

    dtype = compute_dtype(q_BTHK, k_BSHK, v_BSHV, phi_q_BTHF, phi_k_BPHF)
    (B, T, H, K), S = q_BTHK.shape, k_BSHK.shape[1]
    scale = K**-0.5 if scale is None else scale
    q, phi_q, mix = q_BTHK.to(dtype), phi_q_BTHF.to(dtype), mix_H.to(dtype)
    k, v, phi_k = (x.to(dtype).repeat_interleave(H // x.shape[2], 2) for x in (k_BSHK, v_BSHV, phi_k_BPHF))
    real = torch.ones(B, S, dtype=torch.bool, device=q.device) if key_mask_BS is None else key_mask_BS
    if initial_state is None:
        memory = q.new_zeros(B, H, phi_k.shape[3], v.shape[3])
        normaliser = q.new_zeros(B, H, phi_k.shape[3])
    else:
        memory, normaliser = (x.to(dtype) for x in initial_state)
    outputs = [v_BSHV.new_zeros(B, 0, H, v.shape[3], dtype=dtype)]
    for i in range(S):
        gone = i - window  # the key that leaves the window now
        if gone >= 0:
            new = phi_k[:, gone] * real[:, gone, None, None]
            memory = memory + new[..., None] * v[:, gone, :, None]
            normaliser = normaliser + new
        t = i - (S - T)
        if t < 0:
            continue
        numerator = (memory * phi_q[:, t, :, :, None]).sum(2)
        denominator = (normaliser * phi_q[:, t]).sum(-1)
        first = max(0, gone + 1)
        logits = torch.einsum("bhk,bjhk->bjh", q[:, t], k[:, first : i + 1]) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        seen = real[:, first : i + 1, None]
        some = seen.any(1)
        logits = torch.where(some[:, None], logits.masked_fill(~seen, -torch.inf), 0.0)
        lse = torch.where(some, logits.logsumexp(1), -torch.inf)
        p = logits.softmax(1) * some[:, None]
        exponent = (lse - mix if shift == "none" else -mix.expand_as(lse)).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        weight = exponent.exp()
        inside = torch.einsum("bjh,bjhv->bhv", p, v[:, first : i + 1])
        o = (weight[..., None] * inside + numerator) / (weight + denominator)[..., None]
        outputs.append(o[:, None])
    return torch.cat(outputs, 1).to(v_BSHV.dtype), (memory, normaliser)
