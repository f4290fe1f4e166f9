"""RAT's own layer benchmark: a whole layer, norm and projections included, beside one of softmax attention.

D 2048, 16 heads of 128, chunks of 16; queries and keys shared by two groups, which leaves both layers with about as many
parameters; bfloat16 autocast over float32 weights. Source: RAT (arXiv:2507.04416).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linearize.kernels.bench.table import Row
from linearize.kernels.bench.timing import DEVICE, Machine, time_graph_ms, time_ms
from linearize.kernels.rat_attention import RatCache, rat_attention, rat_attention_step

D, H, K, C, GROUPS = 2048, 16, 128, 16, 2
TRAINING = [(64, 4096), (8, 32768), (2, 131072)]  # B, T
DECODING = [(512, 4096), (64, 32768)]  # B, tokens seen
Tables = tuple[Tensor, Tensor]


def tables(rows: int) -> Tables:
    """cos and sin [rows, K] in the layout of Hugging Face models."""
    angle = torch.arange(rows, device=DEVICE)[:, None] * 10000.0 ** (-torch.arange(0, K, 2, device=DEVICE) / K)
    angle = torch.cat([angle, angle], 1)
    return angle.cos(), angle.sin()


# What neither layer has a kernel for is fused by torch.compile, in both.
@functools.cache
def _fused(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(run, dynamic=True)


def _gated(o: Tensor, z: Tensor) -> Tensor:
    return o * torch.sigmoid(z)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)


class Layer(nn.Module):
    """Norm, projections and what lies between, as `inner` does it, from x [B,T,D] in bfloat16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(D))
        self.inward = nn.Linear(D, width, bias=False)
        self.outward = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, tables: Tables, cache: RatCache | None = None) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            h = F.rms_norm(x, (D,), self.norm.to(x.dtype), 1e-6)
        return self.outward(self.inner(self.inward(h), tables, cache))

    def inner(self, y: Tensor, tables: Tables, cache: RatCache | None) -> Tensor:
        raise TypeError(f"{type(self).__name__} must implement inner()")


class RatLayer(Layer):
    """v, gate and z for each head, q and k for each group."""

    def __init__(self) -> None:
        super().__init__(3 * D + 2 * GROUPS * K)

    def inner(self, y: Tensor, tables: Tables, cache: RatCache | None) -> Tensor:
        v, gate, z, q, k = y.split([D, D, D, GROUPS * K, GROUPS * K], -1)
        q, k, v, gate = (x.unflatten(-1, (-1, K)) for x in (q, k, v, gate))
        if cache is None:
            o = rat_attention(q, k, v, gate, chunk_size=C, position_embeddings=tables, sigmoid_gate=True)
        else:
            o = rat_attention_step(q, k, v, gate, cache, position_embeddings=tables, sigmoid_gate=True)
        return _fused(_gated)(o.flatten(-2), z)


class AttentionLayer(Layer):
    """Softmax attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__(3 * D)

    def inner(self, y: Tensor, tables: Tables, cache: RatCache | None) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, K)).transpose(1, 2) for x in y.split(D, -1))
        q, k = (_fused(_turned)(x, *tables) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def layer_work(T: int, width: int, keys: float) -> float:
    """Operations per token of a forward pass whose queries meet `keys` keys on average."""
    return 2.0 * D * (width + D) + 4.0 * H * K * keys


def layer_rows(machine: Machine, repeats: int = 5) -> list[Row]:
    """One training step of each layer: forward, and forward with backward."""
    rows = []
    for B, T in TRAINING:
        x = torch.randn(B, T, D, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        dy = torch.randn_like(x)
        for name, layer, count, keys in (
            ("linearize", RatLayer(), T // C + 1, T / C / 2),
            ("torch SDPA", AttentionLayer(), T, T / 2),
        ):
            layer.to(DEVICE)
            turns = tables(count)
            row = Row("RAT layer" if name == "linearize" else "attention layer", f"B{B} T{T} D{D}", name)

            def forward(layer: Layer = layer, x: Tensor = x, turns: Tables = turns) -> Tensor:
                with torch.autocast("cuda", torch.bfloat16):
                    return layer(x, turns)

            leaves = [x, *layer.parameters()]

            def both(forward: Callable[[], Tensor] = forward, leaves: list[Tensor] = leaves, dy: Tensor = dy) -> None:
                torch.autograd.grad(forward(), leaves, dy)

            operations = B * T * layer_work(T, layer.inward.weight.shape[0], keys)
            row.forward_bound_ms, row.both_bound_ms = (machine.bound_ms(0, n * operations) for n in (1, 3))
            began = time.perf_counter()
            both()
            torch.cuda.synchronize()
            row.first_call_s = time.perf_counter() - began
            row.both_ms = time_ms(both, repeats if keys < 4096 else 2, warmup=1)
            with torch.no_grad():
                row.forward_ms = time_ms(forward, repeats if keys < 4096 else 2, warmup=1)
            rows.append(row)
            del layer, leaves, forward, both
            torch.cuda.empty_cache()
    return rows


def decode_rows(machine: Machine) -> list[Row]:
    """One token through each layer, in a CUDA graph."""
    rows = []
    for B, seen in DECODING:
        x = torch.randn(B, D, device=DEVICE, dtype=torch.bfloat16)
        layer = RatLayer().to(DEVICE, torch.bfloat16)
        row = Row("RAT layer, one step", f"B{B} after {seen}", "linearize")
        cache, turns = full_cache(B, seen - 24, seen + 64), tables(seen // C + 8)

        def step(layer: Layer = layer, x: Tensor = x, turns: Tables = turns, cache: RatCache = cache) -> Tensor:
            with torch.no_grad():
                return layer(x, turns, cache)

        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        row.first_call_s = time.perf_counter() - began
        row.forward_ms = time_graph_ms(step, inner=5, repeats=5)
        moved = 4.0 * B * H * K * (seen / C) + sum(p.nbytes for p in layer.parameters())
        row.forward_bound_ms = machine.bound_ms(moved, 0)
        rows.append(row)
        del cache, step
        rows.append(_softmax_step(machine, x, seen))
        torch.cuda.empty_cache()
    return rows


def full_cache(B: int, seen: int, room: int) -> RatCache:
    """A cache of random pairs of rows that have seen `seen` tokens, reserved for `room`."""
    make: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    cache = RatCache(C)
    cache.keys, cache.values = (torch.randn(B, H, seen // C, K, **make) for _ in range(2))
    cache.running_key, cache.running_value = (torch.randn(B, H, K, device=DEVICE) for _ in range(2))
    cache.position = torch.full((B,), seen, dtype=torch.int64, device=DEVICE)
    cache.length = seen
    cache.reserve(room)
    return cache


def _softmax_step(machine: Machine, x: Tensor, seen: int) -> Row:
    B = x.shape[0]
    layer = AttentionLayer().to(DEVICE, torch.bfloat16)
    keys, values = (torch.randn(B, H, seen, K, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    row = Row("attention layer, one step", f"B{B} after {seen}", "torch SDPA")

    def step() -> Tensor:
        with torch.no_grad():
            h = F.rms_norm(x, (D,), layer.norm, 1e-6)
            q, k, v = layer.inward(h).view(B, 3, H, 1, K).unbind(1)
            keys[:, :, -1:], values[:, :, -1:] = k, v
            return layer.outward(F.scaled_dot_product_attention(q, keys, values).flatten(1))

    row.forward_ms = time_graph_ms(step, inner=5, repeats=5)
    row.forward_bound_ms = machine.bound_ms(2.0 * keys.nbytes, 0)
    return row
