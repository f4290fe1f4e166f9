"""`head-hybrid`: some heads of a layer stay softmax attention, the others become another mixer.

The other mixer is built for its heads alone: its tensors and its state are those of a layer with so many heads, and
keys and values are cached for the softmax heads only. It reads the layer's own q, k and v, so that adapters on the
projections reach both kinds of head. Heads that share a kv head may be divided; their keys are then cached, and
computed for the other mixer, all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import nn

from linearize.convert.attention_spec import SEPARATE, AttentionSpec, mean_keys
from linearize.convert.cache import State
from linearize.convert.calibration import CalibrationSample
from linearize.convert.errors import ConversionError
from linearize.convert.mixers.base import MIXERS, Mixer, MixerOptions, Rope, register
from linearize.kernels.window_attention import window_attention

Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_INNER = "inner."


class HeadHybridOptions(MixerOptions):
    """Options of `head-hybrid`."""

    softmax_heads: list[int] | float = Field(
        0.25,
        description="query heads that stay softmax, [0, 3]; or a share of the kv heads, spread evenly, at least one",
    )
    mixer: str = Field("rodimus", description="the recurrent mixer of the other heads")
    options: dict[str, Any] = Field(default_factory=dict, description="options of that mixer")

    @model_validator(mode="after")
    def _is_buildable(self) -> HeadHybridOptions:
        if isinstance(self.softmax_heads, float) and not 0 < self.softmax_heads <= 1:
            raise ValueError(f"softmax_heads is {self.softmax_heads}; give a share above 0 and up to 1, or a list")
        kind = MIXERS.get(self.mixer)
        if kind is None or not kind.recurrent or issubclass(kind, HeadHybrid):
            raise ValueError(f"mixer is {self.mixer!r}, which is no recurrent mixer")
        kind.Options(**self.options)
        return self

    def every(self) -> dict[str, Any]:
        return {**super().every(), "options": MIXERS[self.mixer].Options(**self.options).every()}


class _HeadProjection(nn.Module):
    """Some heads of the owner's q, k or v in the place of a projection; it has no tensors of its own."""

    def __init__(self, owner: HeadHybrid, which: int, heads: list[int]) -> None:
        super().__init__()
        self.__dict__["owner"] = owner  # not registered: its tensors are not this module's
        self.which = which
        self.heads = heads

    owner: HeadHybrid

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return take_heads(self.owner.project(hidden_states)[self.which], self.heads).flatten(2)


class _HeadsOfAttention(nn.Module):
    """What a mixer reads of the attention it replaces, for some of its heads."""

    def __init__(self, owner: HeadHybrid, heads: list[int], kv_heads: list[int]) -> None:
        super().__init__()
        self.config = owner.attention.config
        self.layer_idx = owner.layer_idx
        for which, (name, chosen) in enumerate(zip(SEPARATE, (heads, kv_heads, kv_heads), strict=True)):
            self.add_module(name, _HeadProjection(owner, which, chosen))
        self.o_proj = nn.Identity()  # the owner projects all heads together


@register
class HeadHybrid(Mixer):
    """Some heads stay softmax attention, the others become a recurrent mixer."""

    name = "head-hybrid"
    Options = HeadHybridOptions
    options: HeadHybridOptions
    inner: Mixer | None

    def __init__(self, spec: AttentionSpec, attention: nn.Module, layer_idx: int, options: HeadHybridOptions) -> None:
        super().__init__(spec, attention, layer_idx, options)
        self.__dict__["projected"] = None
        self.softmax_heads = _softmax_heads(spec, options.softmax_heads)
        self.other_heads = [h for h in range(spec.num_heads) if h not in self.softmax_heads]
        self.cached_kv = sorted({h // spec.group for h in self.softmax_heads})
        kv_of = [h // spec.group for h in self.softmax_heads]
        self.key_index = _key_index([self.cached_kv.index(g) for g in kv_of], spec.group)
        self.inner = self._build_inner() if self.other_heads else None
        self.__dict__["float32_modules"] = tuple(
            f"{_INNER}{name}" for name in (() if self.inner is None else self.inner.float32_modules)
        )

    def _build_inner(self) -> Mixer:
        spec, heads = self.spec, self.other_heads
        kv_heads = _key_index([h // spec.group for h in heads], spec.group)
        smaller = dataclasses.replace(
            spec,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            layout="separate",
            qk_norm=None,
            output_name="o_proj",
        )
        attention = _HeadsOfAttention(self, heads, kv_heads)
        return MIXERS[self.options.mixer].from_attention(smaller, attention, **self.options.options)

    def project(self, hidden_states: torch.Tensor) -> Projections:
        kept: tuple[torch.Tensor, Projections] | None = self.__dict__["projected"]
        return kept[1] if kept is not None and kept[0] is hidden_states else super().project(hidden_states)

    @contextlib.contextmanager
    def _projected(self, hidden_states: torch.Tensor) -> Iterator[Projections]:
        """q, k and v of all heads, which the inner mixer finds again instead of projecting a second time."""
        self.__dict__["projected"] = hidden_states, super().project(hidden_states)
        try:
            yield self.__dict__["projected"][1]
        finally:
            self.__dict__["projected"] = None

    def mix(
        self,
        hidden_states: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State]:
        branches: list[tuple[list[int], torch.Tensor]] = []
        new_state: State = {}
        with self._projected(hidden_states) as (q, k, v):
            if self.softmax_heads:
                q, k, v = (
                    take_heads(x, h) for x, h in ((q, self.softmax_heads), (k, self.cached_kv), (v, self.cached_kv))
                )
                heads, new_state = self.attend_to_all(q, k, v, rope, padding_mask, state, cu_seqlens)
                branches.append((self.softmax_heads, heads))
            if self.inner is not None:
                before = None if state is None else _strip(state)
                heads, after = self.inner.mix(hidden_states, rope, padding_mask, before, cu_seqlens)
                branches.append((self.other_heads, heads))
                new_state |= {_INNER + name: tensor for name, tensor in after.items()}
        return join_heads(branches), new_state

    def attend_to_all(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, State]:
        """The softmax heads `[B, T, H_softmax, K]`, and all the keys and values that later tokens will see."""
        spec = self.spec
        q, k = self.rotate(q, k, rope)
        real = padding_mask if padding_mask is not None else k.new_ones(k.shape[:2], dtype=torch.bool)
        masked = padding_mask is not None or state is not None
        if state is not None:
            k, v, real = (torch.cat([state[n], x], 1) for n, x in (("key", k), ("value", v), ("real", real)))
        heads = window_attention(
            q,
            take_heads(k, self.key_index),
            take_heads(v, self.key_index),
            window=spec.sliding_window or k.shape[1],
            scale=spec.scaling,
            softcap=spec.softcap,
            key_mask=real if masked else None,
            cu_seqlens=cu_seqlens,
        )
        assert isinstance(heads, torch.Tensor)
        first = 0 if spec.sliding_window is None else max(0, k.shape[1] - spec.sliding_window + 1)
        return heads, {"key": k[:, first:], "value": v[:, first:], "real": real[:, first:]}

    @torch.no_grad()
    def calibrate(self, sample: CalibrationSample) -> None:
        """The inner mixer's own start, on its heads."""
        if self.inner is not None:
            with self._projected(sample.hidden_states):
                heads = take_heads(sample.heads, self.other_heads)
                self.inner.calibrate(dataclasses.replace(sample, heads=heads))

    def flops(self, context: int) -> float:
        keys = mean_keys(context, self.spec.sliding_window)
        softmax = 4 * len(self.softmax_heads) * self.spec.head_dim * keys
        own = {id(p) for p in (() if self.inner is None else self.inner.parameters())}
        projections = sum(p.numel() for p in self.parameters() if p.dim() > 1 and id(p) not in own)
        return 2 * projections + softmax + (0.0 if self.inner is None else self.inner.flops(context))

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        spec = self.spec
        kept = context if spec.sliding_window is None else min(context, spec.sliding_window - 1)
        pair = 2 * len(self.cached_kv) * spec.head_dim * dtype.itemsize
        softmax = kept * (pair + 1) if self.softmax_heads else 0
        return softmax + (0 if self.inner is None else self.inner.state_bytes(context, dtype))


def take_heads(x: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """`x[:, :, heads]` by slices alone: x itself for all heads, a view for neighbours, no index tensor."""
    if heads == list(range(x.shape[2])):
        return x
    runs: list[list[int]] = []
    for head in heads:
        if runs and head == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([head, head + 1])
    pieces = [x[:, :, first:last] for first, last in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def join_heads(branches: list[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
    """All heads in order from parts `(head indices, [B, T, len, V])`, in the widest dtype of the parts."""
    order = [head for heads, _ in branches for head in heads]
    together = torch.cat([part for _, part in branches], 2)
    return take_heads(together, sorted(range(len(order)), key=order.__getitem__))


def _key_index(kv_of: list[int], group: int) -> list[int]:
    """Key heads such that query head i of the choice reads key head i // (queries // keys).

    Args:
        kv_of: for every chosen query head the kv head it reads, rising.
        group: query heads per kv head in the whole layer. Whole groups keep one key; otherwise every head has its own.
    """
    distinct = sorted(set(kv_of))
    whole = all(kv_of.count(kv) == group for kv in distinct)
    return distinct if whole else kv_of


def _softmax_heads(spec: AttentionSpec, chosen: list[int] | float) -> list[int]:
    if isinstance(chosen, list):
        if outside := [h for h in chosen if not 0 <= h < spec.num_heads]:
            raise ConversionError(f"softmax_heads: there is no head {outside[0]}; the layer has 0-{spec.num_heads - 1}")
        return sorted(set(chosen))
    count = max(1, round(chosen * spec.num_kv_heads))
    groups = [i * spec.num_kv_heads // count for i in range(count)]
    return [g * spec.group + i for g in groups for i in range(spec.group)]


def _strip(state: State) -> State:
    return {name.removeprefix(_INNER): tensor for name, tensor in state.items() if name.startswith(_INNER)}
