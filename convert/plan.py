"""Which layer gets which mixer with which options, and which keep the teacher's attention."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from linearize.convert.channel_mixers import CHANNEL_MIXERS, ChannelMixer
from linearize.convert.errors import ConversionError
from linearize.convert.mixers import MIXERS, Mixer

KEEP = "keep"
"""In a written plan: this layer keeps the teacher's own attention module, untouched."""


@dataclass(frozen=True)
class LayerPlan:
    """One layer: a mixer's name, or `KEEP`, and its options; a channel mixer's name, or None for the teacher's MLP."""

    mixer: str
    options: dict[str, Any] = field(default_factory=dict)
    ffn: str | None = None
    ffn_options: dict[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        """Whether the attention stays (the MLP may still be replaced)."""
        return self.mixer == KEEP

    def to_config(self) -> dict[str, Any]:
        """JSON of this layer; `ffn` stands in it only where there is one."""
        ffn = {} if self.ffn is None else {"ffn": self.ffn, "ffn_options": self.ffn_options}
        return {"mixer": self.mixer, "options": self.options, **ffn}


@dataclass(frozen=True)
class Plan:
    """One entry per decoder layer."""

    layers: tuple[LayerPlan, ...]

    def to_config(self) -> list[dict[str, Any]]:
        """The form that stands in an exported config.json."""
        return [layer.to_config() for layer in self.layers]

    @classmethod
    def from_config(cls, layers: list[dict[str, Any]]) -> Plan:
        return cls(tuple(LayerPlan(**layer) for layer in layers))

    @property
    def converted(self) -> list[int]:
        return [i for i, layer in enumerate(self.layers) if not layer.kept]

    @property
    def kept(self) -> list[int]:
        return [i for i, layer in enumerate(self.layers) if layer.kept]


def mixer_class(name: str) -> type[Mixer]:
    """The registered mixer, or an error that names the nearest one."""
    if name in MIXERS:
        return MIXERS[name]
    nearest = difflib.get_close_matches(name, MIXERS, n=1, cutoff=0)
    raise ConversionError(
        f"no mixer is named {name!r}; did you mean {nearest[0]!r}? (`linearize list` shows all: {', '.join(sorted(MIXERS))})"
    )


def channel_mixer_class(name: str) -> type[ChannelMixer]:
    """The registered channel mixer, or an error that names the nearest one."""
    if name in CHANNEL_MIXERS:
        return CHANNEL_MIXERS[name]
    raise ConversionError(f"no channel mixer is named {name!r}; there are: {', '.join(sorted(CHANNEL_MIXERS))}")


def make_plan(num_layers: int, to: str, keep_softmax: str | None = None, **options: Any) -> Plan:
    """The plan that `--to`, `--keep-softmax` and mixer options describe.

    Args:
        keep_softmax: layer indices "0,3", a share "25%" (spread evenly, the last of each stretch), or None.
        options: options of the mixer; those it does not have are an error.
    """
    mixer = mixer_class(to)
    try:
        mixer.Options(**options)
    except ValidationError as error:
        first = error.errors()[0]
        known = ", ".join(mixer.Options.model_fields) or "none"
        raise ConversionError(
            f"option {'.'.join(map(str, first['loc']))} = {first['input']!r} of mixer {to!r}: {first['msg']} "
            f"(its options: {known})"
        ) from None
    kept = _kept_layers(num_layers, keep_softmax)
    return Plan(tuple(LayerPlan(KEEP) if i in kept else LayerPlan(to, options) for i in range(num_layers)))


def _kept_layers(num_layers: int, keep_softmax: str | None) -> set[int]:
    if not keep_softmax:
        return set()
    text = keep_softmax.strip()
    advice = f"give layer indices below {num_layers} such as 0,3 or a share such as 25%"
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if not 0 <= share <= 1:
                raise ValueError
            count = round(share * num_layers)
            return {round((i + 1) * num_layers / count) - 1 for i in range(count)}
        indices = {int(part) for part in text.split(",")}
    except ValueError:
        raise ConversionError(f"--keep-softmax {keep_softmax!r} is not understood: {advice}") from None
    if outside := sorted(i for i in indices if not 0 <= i < num_layers):
        raise ConversionError(f"--keep-softmax {keep_softmax!r}: there is no layer {outside[0]}; {advice}")
    return indices
