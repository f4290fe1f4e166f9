"""`ska`: sliding-window attention with one key for all heads, each head having its own query and value.

Source: shared-key attention of Rodimus* (arXiv 2410.06577); the key that the window keeps is one head wide.

    k̃_t = Σ_h B_h k_t^h,   q̃_t^h = A_h q_t^h,   o_t^h = softmax over the window of (R_t q̃_t^h · R_j k̃_j) on v_j^h

For any invertible map the shared key would be lossless if it spanned all heads' keys; at the width of one head it is
a fit. RoPE R turns pairs of channels, each at its own frequency, and what stands between the teacher's q and k must
commute with it: per pair, a complex number. So for every pair the heads' keys, as complex numbers weighted by the
energy of the queries that read them, get their leading principal component: k̃ is its score, A_h and B_h its loadings.
Rotated keys are centred over stretches of `window` tokens first, since what all keys share the softmax cancels. That is
the best fit of the logits for queries in all phases. In each pair one component of H_kv is kept, and `residual` says how
much of the logits' variance is lost. Channels without RoPE have one real fit among them.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.calibration import CalibrationSample
from linearize.convert.mixers.base import Mixer, MixerOptions, Rope, register
from linearize.convert.mixers.parts import HeadMap
from linearize.convert.mixers.window import window_mix


class SharedKeyOptions(MixerOptions):
    """Options of `ska`."""

    window: int = Field(64, ge=1, description="keys a query sees, its own included")


class SharedKey(nn.Module):
    """The maps A of q `[H, K, K]` and B of the teacher's keys `[H_kv, K, K]`. float32; B starts as the heads' mean."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.q_map = HeadMap(spec.num_heads, spec.head_dim)
        self.k_map = nn.Parameter(torch.eye(spec.head_dim).repeat(spec.num_kv_heads, 1, 1) / spec.num_kv_heads)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q `[B, T, H, K]` and k `[B, T, H_kv, K]` before RoPE -> q̃ of q's shape and k̃ `[B, T, 1, K]`."""
        with torch.autocast(q.device.type, enabled=False):
            return self.q_map(q), torch.einsum("bthk,hkc->btc", k, self.k_map.to(k.dtype))[:, :, None]


@register
class SharedKeyAttention(Mixer):
    """Sliding-window attention with one key for all heads (SW-SKA)."""

    name = "ska"
    Options = SharedKeyOptions
    options: SharedKeyOptions
    float32_modules: ClassVar[tuple[str, ...]] = ("shared_key",)

    def __init__(self, spec: AttentionSpec, attention: nn.Module, layer_idx: int, options: SharedKeyOptions) -> None:
        super().__init__(spec, attention, layer_idx, options)
        self.shared_key = SharedKey(spec)

    @property
    def window(self) -> int:
        """Never more than the teacher's own."""
        return min(self.options.window, self.spec.sliding_window or self.options.window)

    def mix(
        self,
        hidden_states: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State]:
        q, k, v = self.project(hidden_states)
        q, k = self.shared_key(q, k)
        q, k = self.rotate(q, k, rope)
        heads, _, state = window_mix(self.spec, self.window, q, k, v, padding_mask, state, cu_seqlens)
        return heads, state

    @torch.no_grad()
    def calibrate(self, sample: CalibrationSample) -> None:
        """The fit of the module's docstring, on the sample's q and k."""
        spec = self.spec
        q, k, _ = self.project(sample.hidden_states)
        pairs, alone = self._channels(sample)
        # [H_kv, K]: each key channel weighted by the root of the energy its queries give it
        energy = q.float().square().mean((0, 1)).view(spec.num_kv_heads, spec.group, -1).sum(1)
        for first, second in pairs:
            energy[:, [first, second]] = energy[:, [first, second]].mean(-1, keepdim=True)
        root = energy.sqrt().clamp_min(1e-6)
        keys = _centred(self.rotate(q, k, sample.rope)[1].float(), self.window) * root
        q_map, k_map = torch.zeros_like(self.shared_key.q_map.weight), torch.zeros_like(self.shared_key.k_map)
        kept = total = 0.0
        for first, second in pairs:
            z = torch.complex(keys[..., first], keys[..., second])
            values, vectors = torch.linalg.eigh(z.mT @ z.conj())  # Σ z_h z̄_g, ascending
            kept, total = kept + float(values[-1]), total + float(values.sum())
            write, read = vectors[:, -1].conj() * root[:, first], vectors[:, -1] / root[:, first]
            _put_complex(k_map, write, first, second)
            _put_complex(q_map, read.conj().repeat_interleave(spec.group), first, second)
        if alone:
            x = keys[..., alone].flatten(1)
            values, vectors = torch.linalg.eigh(x.mT @ x)
            kept, total = kept + float(values[-len(alone) :].sum()), total + float(values.sum())
            basis = vectors[:, -len(alone) :].view(spec.num_kv_heads, len(alone), len(alone))
            index = torch.tensor(alone, device=k_map.device)
            k_map[:, index[:, None], index] = basis * root[:, index, None]
            q_map[:, index[:, None], index] = (basis / root[:, index, None]).repeat_interleave(spec.group, 0)
        self.shared_key.k_map.copy_(k_map)
        self.shared_key.q_map.weight.copy_(q_map)
        self.residual = 1 - kept / total if total else 0.0

    def _channels(self, sample: CalibrationSample) -> tuple[list[tuple[int, int]], list[int]]:
        """Pairs of channels that RoPE turns, `(a, b)` with a -> b a quarter turn forward, and channels it leaves."""
        width = self.spec.head_dim
        if self.spec.rotary is None or sample.rope is None:
            return [], list(range(width))
        cos, sin = (x[:1, :1].float() for x in sample.rope)
        units = torch.eye(width, device=cos.device).expand(1, 1, width, width)
        quarter, _ = self.rotate(units, units, (torch.zeros_like(cos), torch.ones_like(sin)))
        turned = quarter[0, 0]  # row a: where the unit of channel a went
        pairs = [(a, int(row.argmax())) for a, row in enumerate(turned) if row.max() > 0.5 and int(row.argmax()) != a]
        in_pairs = {channel for pair in pairs for channel in pair}
        return pairs, [channel for channel in range(width) if channel not in in_pairs]

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        heads = 1 + self.spec.num_kv_heads
        return self.window * heads * self.spec.head_dim * dtype.itemsize + 8


def _centred(k: torch.Tensor, stretch: int) -> torch.Tensor:
    """k `[B, T, H_kv, K]` less its mean over each stretch of tokens, `[tokens, H_kv, K]`."""
    parts = [part - part.mean(1, keepdim=True) for part in k.split(max(stretch, 2), 1)]
    return torch.cat(parts, 1).flatten(0, 1)


def _put_complex(maps: torch.Tensor, factors: torch.Tensor, first: int, second: int) -> None:
    """Let maps `[H, K, K]` (rows in, columns out) multiply the pair of channels by complex factors `[H]`."""
    maps[:, first, first] = maps[:, second, second] = factors.real
    maps[:, first, second], maps[:, second, first] = factors.imag, -factors.imag
