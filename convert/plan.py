"""Which layer gets which mixer with which options, and which keep the teacher's attention."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from linearize.convert.channel_mixers import CHANNEL_MIXERS, ChannelMixer
from linearize.convert.errors import ConversionError
from linearize.convert.mixers import MIXERS, Mixer
from linearize.convert.plan_text import (
    PlanEntry,
    check_cover,
    entries_from_yaml,
    entries_to_yaml,
    format_layers,
    parse_entries,
)

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

    def with_defaults(self) -> LayerPlan:
        """The layer with every option."""
        options = {} if self.kept else mixer_class(self.mixer).Options(**self.options).every()
        ffn = channel_mixer_class(self.ffn).Options(**self.ffn_options).model_dump(mode="json") if self.ffn else {}
        return LayerPlan(self.mixer, options, self.ffn, ffn)

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options.items())
        return f"{self.mixer}{options}" + (f" + {self.ffn}" if self.ffn else "")


ALIASES = {"rat-swa": (LayerPlan("rat"), LayerPlan("swa", {"window": 1024}))}
"""Names that `--to` takes besides the mixers': what a stretch's layers get in turn."""


@dataclass(frozen=True)
class Plan:
    """One entry per decoder layer."""

    layers: tuple[LayerPlan, ...]

    def to_config(self) -> list[dict[str, Any]]:
        """The form that stands in an exported config.json."""
        return [layer.to_config() for layer in self.layers]

    def with_defaults(self) -> Plan:
        """The plan with every option of every layer, so that it means the same when defaults change."""
        return Plan(tuple(layer.with_defaults() for layer in self.layers))

    @classmethod
    def from_config(cls, layers: list[dict[str, Any]]) -> Plan:
        return cls(tuple(LayerPlan(**layer) for layer in layers))

    def to_yaml(self) -> str:
        """A plan file: equal layers together, in the order in which they first appear."""
        groups: list[tuple[LayerPlan, list[int]]] = []
        for i, layer in enumerate(self.layers):
            for other, indices in groups:
                if other == layer:
                    indices.append(i)
                    break
            else:
                groups.append((layer, [i]))
        return entries_to_yaml(PlanEntry(layers=format_layers(i), **dataclasses.asdict(layer)) for layer, i in groups)

    @classmethod
    def from_yaml(cls, num_layers: int, text: str, where: str = "the plan") -> Plan:
        """Read what `to_yaml` writes, for a model of `num_layers`; `where` names it in errors.

        Raises:
            ConversionError: a key, a mixer, an option or a layer is wrong.
        """
        entries = entries_from_yaml(text, where)
        check_cover(num_layers, entries, where)
        plan = cls(_layers_of(num_layers, entries))
        _check_options(plan.layers)
        return plan

    @property
    def converted(self) -> list[int]:
        return [i for i, layer in enumerate(self.layers) if not layer.kept]

    @property
    def kept(self) -> list[int]:
        return [i for i, layer in enumerate(self.layers) if layer.kept]

    @property
    def name(self) -> str:
        """Its mixers in order of appearance, `rodimus+rat`; fit for a folder's name."""
        return "+".join(dict.fromkeys(layer.mixer for layer in self.layers if not layer.kept)) or KEEP


def mixer_class(name: str) -> type[Mixer]:
    """The registered mixer, or an error that names the nearest one."""
    if name in MIXERS:
        return MIXERS[name]
    known = sorted((*MIXERS, *ALIASES))
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)
    raise ConversionError(
        f"no mixer is named {name!r}; did you mean {nearest[0]!r}? (`linearize list` shows all: {', '.join(known)})"
    )


def channel_mixer_class(name: str) -> type[ChannelMixer]:
    """The registered channel mixer, or an error that names those there are."""
    if name in CHANNEL_MIXERS:
        return CHANNEL_MIXERS[name]
    raise ConversionError(f"no channel mixer is named {name!r}; there are: {', '.join(sorted(CHANNEL_MIXERS))}")


def make_plan(
    num_layers: int,
    to: str,
    keep_softmax: str | None = None,
    *,
    ffn: str | None = None,
    ffn_options: dict[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The plan that `--to`, `--keep-softmax`, `--ffn` and options describe.

    Args:
        to: a mixer (`rodimus`), stretches of layers (`rodimus:0-3,8-11,rat:4-7`, with `keep` for the teacher's
            attention), the alias `rat-swa`, or a plan file (`plan.yaml`).
        keep_softmax: layers that keep the teacher's attention whatever `to` says: indices "0,3" or a share "25%"
            (spread evenly, the last of each stretch); None for none.
        ffn: channel mixer of every layer for which `to` names none.
        ffn_options: options of the channel mixers.
        options: options of the mixers. `chunk=16` goes to every mixer that has it, `{"rat.chunk": 16}` to one.

    Raises:
        ConversionError: a name, an option or a layer is wrong; says which.
    """
    layers = _layers_of(num_layers, parse_entries(num_layers, to))
    layers = tuple(layer if layer.ffn else dataclasses.replace(layer, ffn=ffn) for layer in layers)
    for name, value in options.items():
        layers = _with_option(layers, name, value, "mixer", "options")
    for name, value in (ffn_options or {}).items():
        layers = _with_option(layers, name, value, "ffn", "ffn_options")
    _check_options(layers)
    kept = _kept_layers(num_layers, keep_softmax)
    stay: dict[str, Any] = {"mixer": KEEP, "options": {}}
    return Plan(tuple(dataclasses.replace(layer, **stay) if i in kept else layer for i, layer in enumerate(layers)))


def _layers_of(num_layers: int, entries: list[PlanEntry]) -> tuple[LayerPlan, ...]:
    layers: dict[int, LayerPlan] = {}
    for entry in entries:
        turns = ALIASES.get(entry.mixer, (LayerPlan(entry.mixer),))
        for count, i in enumerate(entry.indices(num_layers, "the plan")):
            turn = turns[count % len(turns)]
            layers[i] = LayerPlan(turn.mixer, {**turn.options, **entry.options}, entry.ffn, dict(entry.ffn_options))
    return tuple(layers[i] for i in range(num_layers))


def _kind(layer: LayerPlan, part: str) -> tuple[str, type[BaseModel]] | None:
    """Name and options of a layer's "mixer" or "ffn"; None where the teacher's own module stays."""
    if part == "ffn":
        return None if layer.ffn is None else (layer.ffn, channel_mixer_class(layer.ffn).Options)
    return None if layer.kept else (layer.mixer, mixer_class(layer.mixer).Options)


def _with_option(layers: tuple[LayerPlan, ...], key: str, value: Any, part: str, field: str) -> tuple[LayerPlan, ...]:
    """The layers with an option given to every mixer that has it, or to the one before the dot."""
    owner, _, name = key.rpartition(".")
    changed: list[LayerPlan] = list(layers)
    kinds: dict[str, str] = {}
    found = False
    for i, layer in enumerate(layers):
        if (kind := _kind(layer, part)) is None:
            continue
        kinds[kind[0]] = ", ".join(kind[1].model_fields) or "none"
        if name in kind[1].model_fields and owner in ("", kind[0]):
            merged: dict[str, Any] = {field: {**getattr(layer, field), name: value}}
            changed[i] = dataclasses.replace(layer, **merged)
            found = True
    if not found:
        known = (
            "; ".join(f"those of {kind!r}: {options}" for kind, options in kinds.items()) or f"the plan has no {part}"
        )
        raise ConversionError(f"option {key} = {value!r} is no option of this plan ({known})")
    return tuple(changed)


def _check_options(layers: tuple[LayerPlan, ...]) -> None:
    for layer in layers:
        for part, given in (("mixer", layer.options), ("ffn", layer.ffn_options)):
            if (kind := _kind(layer, part)) is None:
                continue
            try:
                kind[1](**given)
            except ValidationError as error:
                first = error.errors()[0]
                known = ", ".join(kind[1].model_fields) or "none"
                raise ConversionError(
                    f"option {'.'.join(map(str, first['loc']))} = {first['input']!r} of {part} {kind[0]!r}: "
                    f"{first['msg']} (its options: {known})"
                ) from None


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
