"""`rodimus++`: Rodimus, then shared-key window attention on what it made of the stream, with the two-hop residual.

Source: Rodimus* (arXiv 2410.06577). With X the block's input and S the second hop's output,

    X_s = X + Rodimus(Norm X)
    S   = SW-SKA(Norm X_s),   Ŷ = X_s + S
    Y   = FFN(Norm Ŷ) + X_s                    `two_hop: false`: FFN(Norm Ŷ) + Ŷ, the teacher's own residual

Rodimus is that of `rodimus.py` without its window; SW-SKA sees the last W tokens through one key for all heads (see
`ska.py`). Both use the teacher's q, k, v and o, the second on its own norm, which starts as a copy of the block's.
The block itself stays the family's: a hook on its first norm hands X to the mixer, one on its MLP takes S out of what
the MLP adds to the stream. Both run inside the block's forward, so that checkpointing recomputes them too.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, cast

import torch
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.calibration import CalibrationSample, least_squares
from linearize.convert.errors import ConversionError
from linearize.convert.mixers.base import Rope, register
from linearize.convert.mixers.rodimus import Rodimus, RodimusOptions
from linearize.convert.mixers.ska import SharedKeyAttention, SharedKeyOptions
from linearize.convert.mixers.window import window_mix

NORM_NAMES = ("input_layernorm", "attention_norm", "ln_1", "norm1")


class RodimusPlusOptions(RodimusOptions, SharedKeyOptions):
    """Options of `rodimus++`."""

    window: int = Field(64, ge=1, description="keys that the shared-key attention sees, the token's own included")
    two_hop: bool = Field(
        True, description="whether the next block gets X_s instead of Ŷ (the paper); false starts near the teacher"
    )


class Hops(nn.Module):
    """Scales of both hops' heads. float32."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        shape = (spec.num_heads, spec.head_dim)
        self.scale = nn.Parameter(torch.ones(shape))
        self.window_scale = nn.Parameter(torch.ones(shape))


@register
class RodimusPlus(Rodimus, SharedKeyAttention):
    """Rodimus and shared-key window attention one after the other, with the two-hop residual (Rodimus++)."""

    name = "rodimus++"
    Options = RodimusPlusOptions
    options: RodimusPlusOptions
    reads_stream = True
    float32_modules = (*Rodimus.float32_modules, "shared_key")
    branch: Any

    def __init__(self, spec: AttentionSpec, attention: nn.Module, layer_idx: int, options: RodimusPlusOptions) -> None:
        super().__init__(spec, attention, layer_idx, options)
        if isinstance(self.get_submodule(spec.output_name), nn.Identity):
            raise ConversionError("rodimus++ takes the place of whole layers; choose another mixer for some heads")
        self.branch = Hops(spec)
        self.hop_norm: nn.Module = nn.Identity()
        self.__dict__["stream"] = None
        self.__dict__["second_hop"] = None

    second_hop: tuple[torch.Tensor, torch.Tensor] | None
    """What `attend` returned last, and S in it."""

    def install(self, block: nn.Module, name: str) -> None:
        """Take the attention's place in a block, whose stream the hooks read and, with two hops, change.

        Raises:
            ConversionError: the block is not a norm, attention, a norm, an MLP, each pair added to the stream.
        """
        norms = [n for n, child in block.named_children() if "norm" in type(child).__name__.lower()]
        norm = next((n for n in NORM_NAMES if n in norms), None)
        mlp = getattr(block, "mlp", None)
        plain = getattr(block, "residual_multiplier", 1.0) == 1.0 and isinstance(mlp, nn.Module)
        if norm is None or len(norms) != 2 or not plain:
            raise ConversionError(
                f"layer {self.layer_idx}: rodimus++ needs blocks of norm, attention, norm and MLP on one plain stream; "
                f"{type(block).__name__} has the norms {', '.join(norms) or 'none'}. Take rodimus instead"
            )
        self.hop_norm = copy.deepcopy(block.get_submodule(norm))
        super().install(block, name)
        block.get_submodule(norm).register_forward_pre_hook(functools.partial(_give_stream, self))
        # Always: recomputing for the backward pass leaves the MLP by an exception, and must not keep what it read.
        cast(nn.Module, mlp).register_forward_hook(functools.partial(_take_second_hop, self), always_call=True)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        output, _ = super().forward(hidden_states, **kwargs)
        hop = self.second_hop
        if hop is not None and hop[0] is not output:  # a route looked at the student and went on with the teacher
            self.__dict__["second_hop"] = None
        return output, None

    def attend(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        output, _ = super().attend(hidden_states, *args, **kwargs)
        first = self.further_outputs()
        self.__dict__["second_hop"] = (output, output - first[0]) if first else None
        return output, None

    def mix(
        self,
        hidden_states: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State]:
        q, k, v = self.project(hidden_states)
        tokens = self.tokens(hidden_states, q, k, v, rope, padding_mask, cu_seqlens)
        with torch.autocast(hidden_states.device.type, enabled=False):
            y, new_state = self.recurrence(tokens, state)
        first = self.branch.scale * y
        if self.use == "window":
            first = torch.zeros_like(first)
        second, window_state = self.window_heads(hidden_states, first, rope, padding_mask, state, cu_seqlens)
        second = self.branch.window_scale * second
        heads = first if self.use == "recurrence" else first + second
        return heads, {**new_state, **window_state}

    def further_outputs(self) -> list[torch.Tensor]:
        """With two hops the first one, which alone stays in the stream."""
        first = self.__dict__.pop("first_hop")
        return [first] if self.options.two_hop else []

    def window_heads(
        self,
        hidden_states: torch.Tensor,
        first: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, State]:
        """Heads of SW-SKA `[B, T, H, V]` float32 after the first hop's heads, and the window's state.

        Outside its block there is no stream; the second hop then reads the first one's input.
        """
        hop = self.output(first.to(hidden_states.dtype))
        self.__dict__["first_hop"] = hop
        stream = self.stream
        x = hidden_states
        if stream is not None and stream.shape == x.shape:
            x = self.hop_norm(stream + hop)
        q, k, v = self.project(x)
        q, k = self.shared_key(q, k)
        q, k = self.rotate(q, k, rope)
        heads, _, window_state = window_mix(self.spec, self.window, q, k, v, padding_mask, state, cu_seqlens)
        return heads.float(), window_state

    @torch.no_grad()
    def calibrate(self, sample: CalibrationSample) -> None:
        """The shared key by its fit, then both hops' scales by least squares on the teacher's heads.

        With two hops the stream keeps the first alone, which therefore comes as near as it can and leaves the rest to the
        second; else both are fitted together, twice, since the second hop reads the first.
        """
        SharedKeyAttention.calibrate(self, sample)
        x, branch = sample.hidden_states, self.branch
        q, k, v = self.project(x)
        tokens = self.tokens(x, q.float(), k.float(), v.float(), sample.rope, None, None)
        y, _ = self.recurrence(tokens, None)

        def second_hop() -> torch.Tensor:
            return self.window_heads(x, branch.scale * y, sample.rope, None, None, None)[0]

        if self.options.two_hop:
            branch.scale.copy_(least_squares([y], sample.heads).expand_as(branch.scale))
            second = second_hop()
            branch.window_scale.copy_(
                least_squares([second], sample.heads - branch.scale * y).expand_as(branch.window_scale)
            )
        else:
            branch.scale.zero_()
            for _ in range(2):
                factors = least_squares([y, second_hop()], sample.heads)
                branch.scale.copy_(factors[:, :1].expand_as(branch.scale))
                branch.window_scale.copy_(factors[:, 1:].expand_as(branch.scale))
        del self.__dict__["first_hop"]

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        held = sum(4 * math.prod(shape) for shape in self.recurrence.state_shapes().values())
        return held + SharedKeyAttention.state_bytes(self, context, dtype)


def _give_stream(mixer: RodimusPlus, norm: nn.Module, args: tuple[Any, ...]) -> None:
    """Before the block's first norm: the mixer gets what the norm reads."""
    mixer.__dict__["stream"] = args[0]
    mixer.__dict__["second_hop"] = None


def _take_second_hop(mixer: RodimusPlus, mlp: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """After the MLP: its output less S, which the block adds to Ŷ = X_s + S."""
    hop = mixer.second_hop
    mixer.__dict__["stream"] = mixer.__dict__["second_hop"] = None
    return None if hop is None or output is None else output - hop[1]
