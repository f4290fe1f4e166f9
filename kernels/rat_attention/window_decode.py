"""One token of RAT with a window: the window's keys are a ring of slots, updated in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.rat_attention.windowed import check_options
from linearize.kernels.window_attention.arguments import no_kernel_for

_NAME = "rat_window_attention_step"


@torch.no_grad()
def rat_window_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    offset: Tensor,
    ring: tuple[Tensor, Tensor] | None,
    position: Tensor,
    *,
    window: int,
    chunk_size: int,
    reach: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """One decoding step of `rat_window_attention`; no gradients, and the host waits for nothing.

    Args:
        q: [B, H, K], k, v: [B, G, K], any float dtype; without a window k and v are the running means.
        keys, values: [B, N, G, K], the summary of chunk n at n; what no query sees is not read.
        offset: [H], added to the logits of summaries.
        ring: keys and values, each [B, L, G, K] with L >= window + chunk_size − 1, the token at position p in slot
            p mod L; this token's slot is overwritten. None without a window.
        position: [B] int64, tokens each row has seen before; stays as it is.
        window, chunk_size, reach, scale, softcap: as `rat_window_attention`.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", "chunked" or "reference" (one here).

    Returns:
        o: [B, H, K] in v's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it.
        RuntimeError: the backend asked for can't run here; the message says why.

    Source: RAT (arXiv:2507.04416), its attention over chunks joined with a sliding window.
    """
    dims: dict[str, int] = {}
    shapes: dict[str, tuple[str, ...]] = {"q": ("B", "H", "K"), "k": ("B", "G", "K"), "v": ("B", "G", "K")}
    shapes |= {"keys": ("B", "N", "G", "K"), "values": ("B", "N", "G", "K"), "offset": ("H",)}
    tensors = {"q": q, "k": k, "v": v, "keys": keys, "values": values, "offset": offset}
    if ring is not None:
        tensors["ring[0]"], tensors["ring[1]"] = ring
        shapes["ring[0]"] = shapes["ring[1]"] = ("B", "L", "G", "K")
    for name, tensor in tensors.items():
        check_tensor(_NAME, name, tensor, shapes[name], dims)
    check_tensor(_NAME, "position", position, ("B",), dims)
    check_options(_NAME, dims, window, chunk_size, reach, softcap)
    if position.dtype != torch.int64:
        raise TypeError(f"{_NAME}: position has dtype {position.dtype}; convert it to int64")
    needed = window + chunk_size - 1 if window else 0
    if (ring is None) != (window == 0) or dims.get("L", 0) < needed:
        raise ValueError(
            f"{_NAME}: ring has {dims.get('L', 0)} slots; window={window} with chunk_size={chunk_size} needs {needed}"
            f"{'' if window else ', that is None'}"
        )
    check_float(_NAME, tensors)
    check_same_device(_NAME, {**tensors, "position": position})
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=no_kernel_for(*tensors.values()))
    run: Any = _step
    if chosen == "triton" and q.numel() > 0:
        from linearize.kernels.rat_attention.triton_window_decode import step as run
    return run(q, k, v, keys, values, offset, ring, position, window, chunk_size, reach, scale, softcap)


def _step(
    q_BHK: Tensor,
    k_BGK: Tensor,
    v_BGK: Tensor,
    keys_BNGK: Tensor,
    values_BNGK: Tensor,
    offset_H: Tensor,
    ring: tuple[Tensor, Tensor] | None,
    position_B: Tensor,
    window: int,
    C: int,
    reach: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    (B, H, K), G = q_BHK.shape, k_BGK.shape[1]
    dtype, position = compute_dtype(q_BHK, k_BGK, v_BGK), position_B[:, None]
    exact = (position - window + 1 if window else position).clamp_min(0) // C * C
    farthest = torch.zeros_like(position) if reach is None else position - reach + 1
    n = torch.arange(keys_BNGK.shape[1], device=q_BHK.device)
    far_seen = (n < exact // C) & ((n + 1) * C > farthest)
    if ring is None:
        near, near_seen = (k_BGK[:, None], v_BGK[:, None]), torch.ones_like(position, dtype=torch.bool)
    else:
        L = ring[0].shape[1]
        here = (torch.arange(B, device=q_BHK.device), position_B % L)
        for slots, new in zip(ring, (k_BGK, v_BGK), strict=True):
            slots[here] = new.to(slots.dtype)
        token = position - (position - torch.arange(L, device=q_BHK.device)) % L
        near, near_seen = ring, token >= torch.maximum(exact, farthest)
    q_BGRK = q_BHK.to(dtype).view(B, G, H // G, K)
    logits = []
    for keys, seen, offset in ((keys_BNGK, far_seen, offset_H.to(dtype).view(G, -1, 1)), (near[0], near_seen, 0.0)):
        s = torch.einsum("bgrk,bngk->bgrn", q_BGRK, keys.to(dtype)) * scale
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        logits.append((s + offset).masked_fill(~seen[:, None, None], float("-inf")))
    p = torch.cat(logits, -1).softmax(-1).split([s.shape[-1] for s in logits], -1)
    o = sum(
        torch.einsum("bgrn,bngk->bgrk", weight, values.to(dtype))
        for weight, values in zip(p, (values_BNGK, near[1]), strict=True)
    )
    assert isinstance(o, Tensor)
    return o.reshape(B, H, K).to(v_BGK.dtype)
