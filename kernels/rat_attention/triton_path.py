"""RAT attention on the GPU, put together: one custom operator each way.

Forward: the running pairs, turned queries and own logits in one pass; the chunk summaries; attention over them, by
these kernels or, over many, by torch's. Backward: the same in reverse order.

Bounds: those of the parts (`triton_own.py`, `triton_attend.py`, `dense.py`); a layer's projections are 2·D operations
per weight and token forward and twice that backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.gated_scan.triton_scan import sum_groups
from linearize.kernels.linear_attention.triton_common import last_dense, operand_dtype
from linearize.kernels.rat_attention.cache import RatCache
from linearize.kernels.rat_attention.chunked import packed, remember, unpadded
from linearize.kernels.rat_attention.dense import dense_attend, dense_backward, dense_kernel
from linearize.kernels.rat_attention.rotary import rotate
from linearize.kernels.rat_attention.triton_attend import attend, attend_backward
from linearize.kernels.rat_attention.triton_own import Heads, own_forward
from linearize.kernels.rat_attention.triton_own_backward import own_backward
from linearize.kernels.rat_attention.triton_summaries import gather, gather_back, gather_into


def count_heads(*tensors: Tensor) -> Heads:
    """Of q, k, v and gate [B,T,heads,K]."""
    q, k, v, gate = (x.shape[2] for x in tensors)
    H, G = math.lcm(q, k, v, gate), math.lcm(k, v, gate)
    return Heads(H=H, G=G, Q_GROUP=H // q, K_GROUP=G // k, V_GROUP=G // v, G_GROUP=G // gate)


def _tables(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if cos is None or sin is None else (cos, sin)


# Output, running pairs k̃ and ṽ and, for the backward pass alone: turned q, own logits, log-sum-exp. The last pair in
# float32 is empty unless asked for.
@torch.library.custom_op(
    "linearize::rat_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor? cos, Tensor? sin, int chunk, float scale, bool logits, "
    "bool want_end) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    chunk: int,
    scale: float,
    logits: bool,
    want_end: bool,
) -> tuple[Tensor, ...]:
    heads, tables = count_heads(q, k, v, gate), _tables(cos, sin)
    R, others = heads.H // heads.G, (q.shape[1] - 1) // chunk
    with on_device(q):
        own = own_forward((q, k, v, gate), heads, tables, chunk, scale, logits=logits, want_end=want_end)
        kernel = dense_kernel(own.turned, chunk)
        copies = {"repeat": 1 if kernel is None else R, "copies": 1 if kernel is None else chunk}
        keys = gather(own.key, tables, chunk, others, **copies)
        values = gather(own.value, None, chunk, others, **copies)
        if kernel is None:
            o, lse = attend(own.turned, keys, values, own.value, own.logit, chunk, scale)
        else:
            o, lse = dense_attend(kernel, own.turned, keys, values, own.value, own.logit, chunk, scale)
    return o, own.key, own.value, own.end_key, own.end_value, own.turned, own.logit, lse


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    chunk: int,
    scale: float,
    logits: bool,
    want_end: bool,
) -> tuple[Tensor, ...]:
    heads = count_heads(q, k, v, gate)
    (B, T, _, K), H, G = q.shape, heads.H, heads.G
    S = -(-T // chunk)
    wide: dict[str, Any] = {"dtype": torch.float32}
    end = (B, G, K) if want_end else (0,)
    return (
        v.new_empty(B, T, H, K),
        k.new_empty(B, T, G, K),
        v.new_empty(B, T, G, K),
        q.new_empty(end, **wide),
        q.new_empty(end, **wide),
        q.new_empty(B, S * chunk, H, K),
        q.new_empty(B, H, T, **wide),
        q.new_empty(B, H, T, **wide),
    )


@torch.library.custom_op(
    "linearize::rat_attention_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor? cos, Tensor? sin, Tensor[] saved, Tensor do, "
    "Tensor? d_key, Tensor? d_value, int chunk, float scale, bool logits) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    saved: list[Tensor],
    do: Tensor,
    d_key: Tensor | None,
    d_value: Tensor | None,
    chunk: int,
    scale: float,
    logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    o, key, value, turned, logit, lse = saved
    heads, tables = count_heads(q, k, v, gate), _tables(cos, sin)
    R, G, others = heads.H // heads.G, heads.G, (q.shape[1] - 1) // chunk
    with on_device(q):
        kernel = dense_kernel(turned, chunk)
        if kernel is not None:
            copies = {"repeat": R, "copies": chunk}
            keys = gather(key, tables, chunk, others, **copies)
            values = gather(value, None, chunk, others, **copies)
            dq, dk, dv = dense_backward(kernel, turned, keys, values, o, lse, do, chunk, scale)
        else:
            copies = {"repeat": R, "copies": 1}
            keys, values = gather(key, tables, chunk, others), gather(value, None, chunk, others)
            dq, dk, dv = attend_backward(turned, keys, values, o, lse, do, chunk, scale)
        gained = (dq, gather_back(dk, G, tables, **copies), gather_back(dv, G, None, **copies))
        extra = None if d_key is None or d_value is None else (d_key, d_value)
        gradients = own_backward(
            (q, k, v, gate),
            heads,
            tables,
            (key, value, logit),
            (o, do, lse),
            gained,
            extra,
            chunk,
            scale,
            logits=logits,
        )
    dq, dk, dv, dg = (sum_groups(d, x.shape[2]) for d, x in zip(gradients, (q, k, v, gate), strict=True))
    return dq, dk, dv, dg


@_backward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, gate))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.chunk, ctx.scale, ctx.logits, ctx.want_end = inputs
    o, key, value, _, _, *rest = output
    ctx.mark_non_differentiable(*rest)
    ctx.save_for_backward(*tensors, o, key, value, *rest)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any,
    do: Tensor | None,
    d_key: Tensor | None,
    d_value: Tensor | None,
    d_end_key: Tensor | None,
    d_end_value: Tensor | None,
    *_: None,
) -> tuple[Tensor | None, ...]:
    q, k, v, gate, cos, sin, *saved = ctx.saved_tensors
    o, key, value = saved[:3]
    do = torch.zeros_like(o) if do is None else last_dense(do)
    extra: list[Tensor | None] = [None, None]
    if any(d is not None for d in (d_key, d_value, d_end_key, d_end_value)):
        for place, (like, d, d_end) in enumerate(((key, d_key, d_end_key), (value, d_value, d_end_value))):
            full = torch.zeros_like(like) if d is None else d.clone(memory_format=torch.contiguous_format)
            if d_end is not None and ctx.want_end:
                full[:, -1] += d_end
            extra[place] = full
    gradients = _backward_op(q, k, v, gate, cos, sin, saved, do, *extra, ctx.chunk, ctx.scale, ctx.logits)
    return *gradients, None, None, None, None, None, None


_forward_op.register_autograd(_differentiate, setup_context=_save)


def rat_attention_triton(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    gate_BTHK: Tensor,
    *,
    chunk_size: int,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    cache: RatCache | None = None,
    key_mask_BT: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sigmoid_gate: bool = False,
) -> Tensor:
    """As `rat_attention_reference`, and the gate may hold logits; going on from a cache has no gradients and no mask."""
    options: dict[str, Any] = {
        "chunk_size": chunk_size,
        "position_embeddings": position_embeddings,
        "scale": scale,
        "sigmoid_gate": sigmoid_gate,
    }
    inputs = (q_BTHK, k_BTHK, v_BTHK, gate_BTHK)
    if cu_seqlens is not None:
        return packed(rat_attention_triton, inputs, cu_seqlens, options)
    if key_mask_BT is not None:
        return unpadded(rat_attention_triton, inputs, key_mask_BT, cache=None, **options)

    device, dtype = q_BTHK.device.type, operand_dtype(q_BTHK, k_BTHK, v_BTHK)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    q, k, v = (last_dense(x.to(dtype)) for x in inputs[:3])
    inputs = (q, k, v, last_dense(gate_BTHK))
    tables = None
    if position_embeddings is not None:
        tables = (position_embeddings[0].float().contiguous(), position_embeddings[1].float().contiguous())
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if cache is not None and cache.position is not None:
        o = _go_on(inputs, tables, chunk_size, scale, cache, sigmoid_gate)
        return o.to(v_BTHK.dtype)
    o, key, value, *end = _forward_op(
        *inputs, *(tables or (None, None)), chunk_size, scale, sigmoid_gate, cache is not None
    )[:5]
    if cache is not None:
        _remember(cache, inputs, (key, value), end, tables, (k_BTHK.dtype, v_BTHK.dtype))
    return o.to(v_BTHK.dtype)


def _remember(
    cache: RatCache,
    inputs: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor],
    end: list[Tensor],
    tables: tuple[Tensor, Tensor] | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """Fill an empty cache; it has as many heads as k and v each need."""
    _, k, v, gate = inputs
    C, T, G = cache.chunk_size, k.shape[1], own[0].shape[2]
    steps = [G // math.lcm(x.shape[2], gate.shape[2]) for x in (k, v)]
    keys, values = (x[:, C - 1 :: C, ::step].to(dtype) for x, step, dtype in zip(own, steps, dtypes, strict=True))
    if tables is not None:
        cos, sin = (table[: keys.shape[1], None] for table in tables)
        keys = rotate(keys.float(), cos, sin).to(keys.dtype)
    running = [x[:, None, ::step] for x, step in zip(end, steps, strict=True)]
    remember(cache, keys.transpose(1, 2), values.transpose(1, 2), running, None, T)


@torch.compiler.disable
def _go_on(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor] | None,
    C: int,
    scale: float,
    cache: RatCache,
    logits: bool,
) -> Tensor:
    """More tokens for rows that each stand where they are: summaries go straight into the cache's slots."""
    assert cache.keys is not None and cache.values is not None and cache.position is not None
    assert cache.running_key is not None and cache.running_value is not None
    heads, T = count_heads(*inputs), inputs[0].shape[1]
    cache.grow(-(-(cache.length + T) // C))
    running = cache.running_key.contiguous(), cache.running_value.contiguous()
    with on_device(inputs[0]):
        own = own_forward(
            inputs, heads, tables, C, scale, logits=logits, want_end=True, start=(cache.position, *running)
        )
        gather_into(cache.keys, own.key, tables, C, cache.position)
        gather_into(cache.values, own.value, None, C, cache.position)
        keys, values = (x.transpose(1, 2).to(own.value.dtype) for x in (cache.keys, cache.values))
        o, _ = attend(own.turned, keys, values, own.value, own.logit, C, scale, cache.position)
    cache.running_key, cache.running_value = own.end_key, own.end_value
    cache.position = cache.position + T
    cache.length += T
    return o
