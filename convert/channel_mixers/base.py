"""What every channel mixer shares: it takes the place of a block's MLP and keeps the teacher's MLP inside.

The MLP's projections keep their own names, so that their tensors stay where the teacher's checkpoint has them;
everything new stands in small submodules. A channel mixer reads one token at a time and has no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

CHANNEL_MIXERS: dict[str, type[ChannelMixer]] = {}
"""Every channel mixer by its name."""


class ChannelMixerOptions(BaseModel):
    """Options of a channel mixer. Fields carry their documentation; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def register(mixer: type[ChannelMixer]) -> type[ChannelMixer]:
    """Class decorator: make a channel mixer available under its `name`."""
    if mixer.name in CHANNEL_MIXERS:
        known = CHANNEL_MIXERS[mixer.name].__qualname__
        raise ValueError(f"a channel mixer named {mixer.name!r} is registered already: {known}")
    CHANNEL_MIXERS[mixer.name] = mixer
    return mixer


class ChannelMixer(nn.Module):
    """Base class. A subclass names itself, types its options and implements `mix`.

    Args:
        mlp: the teacher's module, whose submodules are taken over (shared, not copied).
        layer_idx: the block's index.
        hidden_size: D, width of the block's input and output.
        options: an instance of the subclass's `Options`.
    """

    name: ClassVar[str]
    Options: ClassVar[type[ChannelMixerOptions]] = ChannelMixerOptions
    float32_modules: ClassVar[tuple[str, ...]] = ()
    """Submodules that stay in float32 whatever the model's dtype."""

    def __init__(self, mlp: nn.Module, layer_idx: int, hidden_size: int, options: ChannelMixerOptions) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.hidden_size = hidden_size
        self.options = options
        for name, module in mlp.named_children():
            self.add_module(name, module)
        for name, parameter in mlp.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in mlp.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in mlp._non_persistent_buffers_set)
        # Not registered: its tensors are the submodules above, and it must not appear in the state dict. Adapters
        # replace submodules of the mixer, never of the MLP, so the MLP stays the exact teacher.
        self.__dict__["mlp"] = mlp
        self.__dict__["route"] = None

    mlp: nn.Module
    route: Callable[[ChannelMixer, torch.Tensor], torch.Tensor] | None
    """When set, `forward` hands the call over: `route(channel_mixer, hidden_states)`."""

    @classmethod
    def from_mlp(cls, mlp: nn.Module, layer_idx: int, hidden_size: int, **options: Any) -> ChannelMixer:
        """Build around the teacher's MLP, new tensors at their starting values (float32), equal to it to the bit.

        Raises:
            pydantic.ValidationError: an option is unknown or out of range.
        """
        mixer = cls(mlp, layer_idx, hidden_size, cls.Options(**options))
        for name in mixer.float32_modules:
            mixer.get_submodule(name).float()
        return mixer

    def __getattr__(self, name: str) -> Any:
        """What the MLP's own `forward` reads of itself besides its submodules: its activation, sizes, switches."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            mlp = self.__dict__.get("mlp")
            if mlp is None:
                raise
            return getattr(mlp, name)

    def shared(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The teacher's MLP through this module's projections, which adapters may have wrapped; `[B, T, D]`."""
        return cast(torch.Tensor, cast(Any, type(self.mlp)).forward(self, hidden_states))

    def mix(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The block's normalised input `[B, T, D]` to the MLP's replacement `[B, T, D]`."""
        raise TypeError(f"{type(self).__name__} must implement mix()")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.route is not None:
            return self.route(self, hidden_states)
        return self.mix(hidden_states)

    def flops(self) -> float:
        """FLOPs of one token's forward pass, 2 per multiply-add: every matrix once. One that reads only a part of its
        tensors says so."""
        return 2.0 * sum(p.numel() for p in self.parameters() if p.dim() > 1)

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """The tensors that the teacher does not have, by name inside the channel mixer."""
        kept = {id(p) for p in self.mlp.parameters()}
        return {name: p for name, p in self.named_parameters() if id(p) not in kept and "lora_" not in name}


def teacher_route(mixer: ChannelMixer, hidden_states: torch.Tensor) -> torch.Tensor:
    """Route that makes a channel mixer compute what the teacher's MLP does."""
    return cast(torch.Tensor, mixer.mlp(hidden_states))
