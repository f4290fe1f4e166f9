"""Attention over many chunk summaries through torch's own attention, joined with the own pairs.

Seen chunk by chunk, the tokens at one place of their chunks are queries that meet the summaries strictly causally:
moved by one, that is plain causal attention with S − 1 queries and S − 1 summaries, for C·H heads. What it returns
is joined with the own pair through the log-sum-exp. The backward pass hands torch the joined output and
log-sum-exp: its probabilities are then those of the whole softmax, and its gradients exact.

Bounds per token and head: T/C / 2 summaries on average, 4·K operations each forward and 10·K backward. Copies of the
summaries for every place in a chunk cost 8·K bytes forward and 16·K backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.rat_attention import launch
from linearize.kernels.rat_attention.launch import TABLE

_ops = torch.ops.aten


def dense_kernel(q: Tensor, C: int) -> str | None:
    """Which of torch's kernels takes over for turned q [B,S·C,H,K]: "cudnn", "flash", "cpu", or None: none does.

    Few summaries are not worth the copies. cuDNN's gradients do not repeat bit for bit, so a program that asks for
    deterministic ones gets the Triton kernels.
    """
    B, padded, H, K = q.shape
    S = padded // C
    if max(2, launch.DENSE_FROM) > S or q.element_size() > 2 or K % 8 or K > 128 or B > 65535 or C * H > 65535:
        return None
    if q.device.type == "cpu":
        return "cpu"
    if torch.are_deterministic_algorithms_enabled():
        return None
    part = q.view(B, S, C * H, K)[:, 1:].transpose(1, 2)
    params = torch.backends.cuda.SDPAParams(part, part, part, None, 0.0, True, False)
    if torch.backends.cuda.can_use_cudnn_attention(params, False):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(params, False) else None


@triton.jit(do_not_specialize=["T"])
def _join(
    part_ptr,
    part_lse_ptr,
    own_v_ptr,
    logit_ptr,
    o_ptr,
    lse_ptr,
    T,
    part_b,
    part_j,
    part_n,
    H: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """o [B,T,H,K] and the whole log-sum-exp [B,H,T]."""
    tiles = tl.cdiv(T, ROWS)
    h = tl.program_id(0) % H
    t = (tl.program_id(0) // H % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    b = (tl.program_id(0) // H // tiles).to(tl.int64)
    i = tl.arange(0, K_BLOCK)
    others = (T - 1) // C
    n = t // C - 1
    j = (t % C) * H + h
    real = t < T
    ok = real[:, None] & (i < K)[None, :]
    later = (n >= 0) & (n < others)
    place = (b * (C * H) + j) * others + n
    part_lse = tl.load(part_lse_ptr + place, mask=later, other=float("-inf"))
    logit = tl.load(logit_ptr + (b * H + h) * T + t, mask=real, other=0.0)
    top = tl.maximum(part_lse, logit)
    lse = top + tl.log(tl.exp(part_lse - top) + tl.exp(logit - top))
    own = tl.load(own_v_ptr + ((b * T + t) * G + h // (H // G))[:, None] * K + i[None, :], mask=ok, other=0.0)
    at = part_ptr + b * part_b + j[:, None] * part_j + n[:, None] * part_n + i[None, :]
    part = tl.load(at, mask=ok & later[:, None], other=0.0)
    o = part.to(tl.float32) * tl.exp(part_lse - lse)[:, None] + own.to(tl.float32) * tl.exp(logit - lse)[:, None]
    tl.store(o_ptr + ((b * T + t) * H + h)[:, None] * K + i[None, :], o.to(o_ptr.dtype.element_ty), mask=ok)
    tl.store(lse_ptr + (b * H + h) * T + t, lse, mask=real)


def dense_attend(
    kernel: str, q: Tensor, keys: Tensor, values: Tensor, own_value: Tensor, logit: Tensor, C: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Turned q [B,S·C,H,K], copied summaries [B,S−1,C·H,K], own values, own logits -> o, log-sum-exp."""
    B, T, G, K = own_value.shape
    H = q.shape[2]
    part, lse = _forward(kernel, *_by_place(q, keys, values, C), scale)
    o, whole = own_value.new_empty(B, T, H, K), torch.empty_like(logit)
    block, pick = max(16, triton.next_power_of_2(K)), TABLE["move"]
    rows = max(1, pick.rows // block)
    _join[(-(-T // rows) * B * H,)](
        part, lse.contiguous(), own_value, logit, o, whole, T, *part.stride()[:3],
        H=H, G=G, C=C, K=K, ROWS=rows, K_BLOCK=block, num_warps=pick.warps,
    )  # fmt: skip
    return o, whole


def dense_backward(
    kernel: str,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    C: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [B,C·H,S−1,K] of the turned q from the second chunk on and [B,S−1,C·H,K] of the copied summaries."""
    B, T, H, K = o.shape
    if rest := q.shape[1] - T:
        o, do = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rest)) for x in (o, do))
        lse = torch.nn.functional.pad(lse, (0, rest))
    by_place = lse.view(B, H, -1, C)[:, :, 1:].permute(0, 3, 1, 2).reshape(B, C * H, -1)
    if kernel == "cudnn":
        by_place = by_place[..., None]
    out, d_out = (x.contiguous().view(B, -1, C * H, K)[:, 1:].transpose(1, 2) for x in (o, do))
    dq, dk, dv = _backward(kernel, *_by_place(q, keys, values, C), out, by_place, d_out, scale)
    return dq, dk.transpose(1, 2), dv.transpose(1, 2)


def _by_place(q: Tensor, keys: Tensor, values: Tensor, C: int) -> tuple[Tensor, Tensor, Tensor]:
    B, _, H, K = q.shape
    return q.view(B, -1, C * H, K)[:, 1:].transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def _forward(kernel: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if kernel == "cudnn":
        return _ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)[:2]
    if kernel == "flash":
        return _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[:2]
    return _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)


def _backward(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if kernel == "cpu":
        return _ops._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse, 0.0, True, scale=scale)
    n = q.shape[2]
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a dropout that there is not
    if kernel == "cudnn":
        return _ops._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, unused, unused, None, None, None, n, n, 0.0, True, scale=scale
        )
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return _ops._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse, None, None, n, n, 0.0, True, seed, unused, scale=scale
    )
