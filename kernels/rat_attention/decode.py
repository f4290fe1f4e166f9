"""One token of RAT attention: the cache is updated in place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linearize.kernels.checks import check_float, check_same_device, check_tensor
from linearize.kernels.dispatch import resolve_backend
from linearize.kernels.gated_scan.arguments import check_gate
from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.rat_attention.arguments import check_cache, check_heads, check_tables
from linearize.kernels.rat_attention.cache import RatCache
from linearize.kernels.rat_attention.rotary import rotate

_NAME = "rat_attention_step"


@torch.no_grad()
def rat_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    cache: RatCache,
    *,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    sigmoid_gate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """One decoding step of `rat_attention`; no gradients.

    Args:
        q: [B, Hq, K], k: [B, Hk, K], v: [B, Hv, K], gate: [B, Hg, K] in [0, 1], any float dtype; each number of
            heads divides the largest, H, and consecutive heads share one.
        cache: what came before, or an empty one; updated in place with this token.
        position_embeddings: (cos, sin), each [N, R], indexed by chunk, R <= K. Default: no rotation.
        scale: multiplies the logits. Default: `K ** -0.5`.
        sigmoid_gate: whether `gate` holds logits, of which the sigmoid is taken in float32. Default: False.
        backend: "auto" (Triton on CUDA, else plain torch), "triton", or "chunked" / "reference" (plain torch).

    Returns:
        o: [B, H, K] in v's dtype.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device; the message names it.

    Source: RAT (arXiv:2507.04416).
    """
    dims: dict[str, int] = {}
    check_tensor(_NAME, "q", q, ("B", "Hq", "K"), dims)
    check_tensor(_NAME, "k", k, ("B", "Hk", "K"), dims)
    check_tensor(_NAME, "v", v, ("B", "Hv", "K"), dims)
    check_tensor(_NAME, "gate", gate, ("B", "Hg", "K"), dims)
    H = check_heads(_NAME, dims)
    tensors = {"q": q, "k": k, "v": v, "gate": gate}
    check_float(_NAME, tensors)
    check_same_device(_NAME, tensors)
    if not sigmoid_gate:
        check_gate(_NAME, gate)
    heads = math.lcm(dims["Hk"], dims["Hg"]), math.lcm(dims["Hv"], dims["Hg"])
    check_cache(_NAME, cache, dims["B"], heads, dims["K"], q.device)
    check_tables(_NAME, position_embeddings, cache.length // cache.chunk_size + 1, dims["K"], q.device)
    B, K = dims["B"], dims["K"]
    if cache.position is None:
        _start(cache, B, heads, K, compute_dtype(q, k, v, gate), k, v)
    cache.grow_for_next()
    assert cache.position is not None and cache.running_key is not None
    scale = K**-0.5 if scale is None else float(scale)
    unsupported = _no_kernel_for((q, k, v, gate), heads, cache)
    chosen = resolve_backend(backend, q.device, operation=_NAME, unsupported=unsupported)
    if chosen == "triton" and B > 0:
        o = _triton_step((q, k, v, gate), cache, position_embeddings, scale, sigmoid_gate)
    else:
        if sigmoid_gate:
            gate = torch.sigmoid(gate.to(cache.running_key.dtype))
        q = q if q.shape[1] == H else q.repeat_interleave(H // q.shape[1], dim=1)
        o = _torch_step((q, k, v, gate), cache, position_embeddings, scale)
    cache.position.add_(1)
    cache.length += 1
    return o


def _no_kernel_for(token: tuple[Tensor, ...], heads: tuple[int, int], cache: RatCache) -> str | None:
    """Why this step has no Triton kernel, or None if it has one."""
    assert cache.running_key is not None
    if cache.running_key.dtype != torch.float32 or any(x.dtype == torch.float64 for x in token):
        return "the Triton kernels take float16, bfloat16 and float32, not float64"
    if token[0].shape[-1] > 256:
        return f"the Triton kernels take widths up to K=256, not {token[0].shape[-1]}"
    if heads[0] != heads[1]:
        return "the Triton step takes as many running keys as running values"
    return None


def _triton_step(
    token: tuple[Tensor, Tensor, Tensor, Tensor],
    cache: RatCache,
    tables: tuple[Tensor, Tensor] | None,
    scale: float,
    logits: bool,
) -> Tensor:
    from linearize.kernels.rat_attention.triton_decode import step

    assert cache.keys is not None and cache.values is not None and cache.position is not None
    assert cache.running_key is not None and cache.running_value is not None
    # A prefill may have left views.
    cache.running_key, cache.running_value = cache.running_key.contiguous(), cache.running_value.contiguous()
    if cache.keys.stride(-1) != 1 or cache.values.stride(-1) != 1:
        cache.keys, cache.values = cache.keys.contiguous(), cache.values.contiguous()
    if tables is not None:
        tables = (tables[0].float().contiguous(), tables[1].float().contiguous())
    running, slots = (cache.running_key, cache.running_value), (cache.keys, cache.values)
    return step(token, running, slots, cache.position, tables, cache.chunk_size, scale, logits=logits)


def _torch_step(
    token: tuple[Tensor, Tensor, Tensor, Tensor],
    cache: RatCache,
    position_embeddings: tuple[Tensor, Tensor] | None,
    scale: float,
) -> Tensor:
    q, k, v, gate = token
    (B, H, K), C = q.shape, cache.chunk_size
    assert cache.keys is not None and cache.values is not None and cache.position is not None
    assert cache.running_key is not None and cache.running_value is not None
    heads = cache.keys.shape[1], cache.values.shape[1]
    # The running pair, reset where a chunk starts.
    first_B11 = (cache.position % C == 0)[:, None, None]
    for x, running in ((k, cache.running_key), (v, cache.running_value)):
        dtype, G = running.dtype, running.shape[1]
        x_BGK, g_BGK = (t.to(dtype).repeat_interleave(G // t.shape[1], dim=1) for t in (x, gate))
        running.masked_fill_(first_B11, 0.0)
        running.copy_(torch.lerp(x_BGK, running, g_BGK))

    # The current chunk's slot holds the pair so far, so that one softmax over the slots is all there is.
    chunk_B = cache.position // C
    cos, sin = (None, None) if position_embeddings is None else (x[chunk_B][:, None] for x in position_embeddings)
    for slots, own in ((cache.keys, rotate(cache.running_key, cos, sin)), (cache.values, cache.running_value)):
        index = chunk_B[:, None, None, None].expand(-1, own.shape[1], 1, K)
        slots.scatter_(2, index, own[:, :, None].to(slots.dtype))

    n = cache.slots if cache.fixed else cache.length // C + 1
    seen = torch.arange(n, device=q.device) <= chunk_B[:, None]
    G = math.lcm(*heads)
    dtype = torch.promote_types(cache.keys.dtype, cache.values.dtype)
    keys, values = (
        (x[:, :, :n] if x.shape[1] == G else x[:, :, :n].repeat_interleave(G // x.shape[1], dim=1)).to(dtype)
        for x in (cache.keys, cache.values)
    )
    q_BGRK = rotate(q.to(cache.running_key.dtype), cos, sin).view(B, G, H // G, K).to(dtype)
    o_BGRK = torch.nn.functional.scaled_dot_product_attention(
        q_BGRK, keys, values, attn_mask=seen[:, None, None], scale=scale
    )
    return o_BGRK.reshape(B, H, K).to(v.dtype)


def _start(cache: RatCache, B: int, heads: tuple[int, int], K: int, dtype: torch.dtype, k: Tensor, v: Tensor) -> None:
    cache.keys, cache.values = (x.new_zeros(B, G, 0, K) for x, G in zip((k, v), heads, strict=True))
    cache.running_key, cache.running_value = (k.new_zeros(B, G, K, dtype=dtype) for G in heads)
    cache.position = torch.zeros(B, dtype=torch.int64, device=k.device)
