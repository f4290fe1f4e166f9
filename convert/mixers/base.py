"""What every mixer shares: the teacher's projections, the cache protocol, registration by name.

A mixer takes the place of a block's attention. It keeps the attention's projections under their own names, so
that their tensors stay where the teacher's checkpoint has them, and puts everything new into small submodules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from linearize.convert.attention_spec import FUSED, AttentionSpec, mean_keys
from linearize.convert.cache import MixerCacheLayer, State
from linearize.convert.mixers.window import window_bytes

Rope = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each `[B or 1, T, rotary_dim]`, as the decoder passes them to its attention."""

MIXERS: dict[str, type[Mixer]] = {}
"""Every mixer by the name that `--to` takes."""


class MixerOptions(BaseModel):
    """Options of a mixer. Fields carry their documentation; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def every(self) -> dict[str, Any]:
        """Every option as JSON, defaults too."""
        return self.model_dump(mode="json")


def register(mixer: type[Mixer]) -> type[Mixer]:
    """Class decorator: make a mixer available under its `name`."""
    if mixer.name in MIXERS:
        raise ValueError(f"a mixer named {mixer.name!r} is registered already: {MIXERS[mixer.name].__qualname__}")
    MIXERS[mixer.name] = mixer
    return mixer


class Mixer(nn.Module):
    """Base class. A subclass names itself, types its options and implements `mix` and `state_bytes`.

    Args:
        spec: the attention it replaces.
        attention: the teacher's module, whose projections are taken over (shared, not copied).
        layer_idx: the block's index.
        options: an instance of the subclass's `Options`.
    """

    name: ClassVar[str]
    Options: ClassVar[type[MixerOptions]] = MixerOptions
    recurrent: ClassVar[bool] = True
    """Whether its cache is a `MixerCacheLayer` (otherwise the teacher's own kind of layer)."""
    float32_modules: ClassVar[tuple[str, ...]] = ()
    """Submodules that stay in float32 whatever the model's dtype."""
    use: Literal["both", "window", "recurrence"] = "both"
    """Which branch of a hybrid with a window speaks, each with all the weight; other than "both" only to measure."""
    residual: float | None = None
    """What calibration measured that the mixer's form cannot hold of the attention's logits, as a share of their
    variance; None where it measured none."""
    stream: torch.Tensor | None = None
    """For a mixer that `reads_stream`, while it works: `[B, T, D]` that entered its block. Blocks give it by a hook,
    whoever calls `mix` alone by `in_stream`."""
    reads_stream: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    """Whether `mix` follows `use` when `options.window` is not 0."""

    def __init__(self, spec: AttentionSpec, attention: Any, layer_idx: int, options: MixerOptions) -> None:
        super().__init__()
        self.spec = spec
        self.layer_idx = layer_idx
        self.options = options
        for name in spec.projection_names:
            self.add_module(name, getattr(attention, name))
        if spec.qk_norm is not None:
            self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        # Not registered: its tensors are the projections above, and it must not appear in the state dict. Adapters
        # replace submodules of the mixer, never of the attention, so the attention stays the exact teacher.
        self.__dict__["attention"] = attention
        self.__dict__["route"] = None

    attention: Any
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    route: Callable[..., tuple[torch.Tensor, None]] | None
    """When set, `forward` hands the call over: `route(mixer, hidden_states, **kwargs)`. Stages use it to run the
    teacher through the student, and to look at both at once."""

    @classmethod
    def from_attention(cls, spec: AttentionSpec, attention: Any, **options: Any) -> Mixer:
        """Build from the teacher's attention, new tensors at their starting values (float32).

        Raises:
            pydantic.ValidationError: an option is unknown or out of range.
        """
        mixer = cls(spec, attention, int(attention.layer_idx), cls.Options(**options))
        for name in mixer.float32_modules:
            mixer.get_submodule(name).float()
        return mixer

    def install(self, block: nn.Module, name: str) -> None:
        """Take the attention's place in its decoder block, where it is called `name`.

        Raises:
            ConversionError: the mixer needs more of the block than the block has.
        """
        setattr(block, name, self)

    # ------------------------------------------------------------------ the teacher's projections

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[B, T, H, K]`, k and v `[B, T, H_kv, K]` as the teacher computes them, before RoPE."""
        spec = self.spec
        if spec.layout == "separate":
            q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        else:
            widths = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
            q, k, v = self.get_submodule(FUSED)(hidden_states).split(widths, dim=-1)
        if spec.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, spec.head_dim)) for x in (q, k, v))
        if spec.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def rotate(self, q: torch.Tensor, k: torch.Tensor, rope: Rope | None) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE by the family's own function; q and k as `project` returns them."""
        if self.spec.rotary is None or rope is None:
            return q, k
        return self.spec.rotary(q, k, *rope, unsqueeze_dim=2)

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """kv heads to query heads: `[B, T, H_kv, ·]` to `[B, T, H, ·]`, head `h` from kv head `h // group`."""
        return x.repeat_interleave(self.spec.group, dim=2) if self.spec.group > 1 else x

    def output(self, heads: torch.Tensor) -> torch.Tensor:
        """The teacher's output projection of `[B, T, H, V]`."""
        return self.get_submodule(self.spec.output_name)(heads.flatten(-2))

    # ------------------------------------------------------------------ what a subclass implements

    def mix(
        self,
        hidden_states: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State]:
        """Mix tokens.

        Args:
            hidden_states: `[B, T, D]`, the block's normalised input.
            padding_mask: `[B, T]`, True at real tokens; None when all are real.
            state: what earlier tokens left, None at the start of a sequence.
            cu_seqlens: `[N + 1]` int, boundaries of packed sequences (B is 1); None for one sequence per row.

        Returns:
            heads `[B, T, H, V]` before the output projection, and the state after the last token.
        """
        raise TypeError(f"{type(self).__name__} must implement mix()")

    def mix_and_project(
        self,
        hidden_states: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, State]:
        """Arguments as `mix`; returns its heads in the model's dtype, their output `[B, T, D]`, and the state."""
        heads, after = self.mix(hidden_states, rope, padding_mask, state, cu_seqlens)
        heads = heads.to(hidden_states.dtype)
        return heads, self.output(heads), after

    @contextmanager
    def in_stream(self, stream: torch.Tensor | None) -> Iterator[None]:
        """Context: `mix` works as in a block that `stream` `[B, T, D]` entered; only of use if it `reads_stream`."""
        self.__dict__["stream"] = stream
        try:
            yield
        finally:
            self.__dict__["stream"] = None

    def further_outputs(self) -> list[torch.Tensor]:
        """After `mix`: other outputs `[B, T, D]` that the block uses in the attention's place; default none."""
        return []

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        """Bytes that one sequence of `context` tokens holds in the cache."""
        raise TypeError(f"{type(self).__name__} must implement state_bytes()")

    def softmax_window(self) -> int | None:
        """Keys that its softmax sees: 0 where there is none, None where it sees all."""
        window = getattr(self.options, "window", 0) if self.recurrent else self.spec.sliding_window
        return min(window, self.spec.sliding_window) if window and self.spec.sliding_window else window

    def flops(self, context: int) -> float:
        """FLOPs of one token's forward pass, the mean over a sequence of `context` tokens; 2 per multiply-add.

        Every matrix counts once, every key that a softmax sees by its logit and its value, and every number of the
        state by being updated and read. Elementwise work is left out. A mixer that computes otherwise says so.
        """
        spec, visible, memory = self.spec, self.softmax_window(), 0
        if self.recurrent:
            held = self.state_bytes((context + 1) // 2, torch.float32)
            memory = (held - (window_bytes(spec, visible, torch.float32) if visible else 0)) // 4
        keys = mean_keys(context, visible) if visible != 0 else 0.0
        matrices = sum(p.numel() for p in self.parameters() if p.dim() > 1)
        return 2 * matrices + 4 * spec.num_heads * spec.head_dim * keys + 4 * memory

    def calibrate(self, sample: Any) -> None:
        """Set new tensors in closed form from a `CalibrationSample` of the teacher; default: keep the start."""

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """The tensors that the teacher does not have, by name inside the mixer."""
        kept = {id(p) for p in self.attention.parameters()}
        return {name: p for name, p in self.named_parameters() if id(p) not in kept and "lora_" not in name}

    # ------------------------------------------------------------------ called by the decoder block

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        if self.route is not None:
            return self.route(self, hidden_states, **kwargs)
        return self.attend(hidden_states, **kwargs)

    def attend(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rope | None = None,
        past_key_values: Any = None,
        padding_mask: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """The student's own path: mix, keep the state, project out."""
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        if layer is not None and not isinstance(layer, MixerCacheLayer):
            raise TypeError(
                f"layer {self.layer_idx} is a {self.name} mixer, but the cache holds a {type(layer).__name__} there; "
                "leave past_key_values out or pass model.new_cache()"
            )
        tokens = hidden_states.shape[1]
        if padding_mask is not None:
            padding_mask = padding_mask[:, -tokens:].bool()
        state = layer.state if layer is not None else None
        made = self.mix_and_project(hidden_states, position_embeddings, padding_mask, state, cu_seq_lens_q)
        if layer is not None:
            layer.advance(made[2], tokens)
        return made[1], None
