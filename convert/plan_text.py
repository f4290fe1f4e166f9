"""The written forms of a plan: `rodimus`, `rodimus:0-7,rat:8-15`, and a YAML file with an entry per stretch of layers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from linearize.convert.errors import ConversionError

YAML_SUFFIXES = (".yaml", ".yml")


class PlanEntry(BaseModel):
    """Some layers and what they get: one element of the list that a plan file holds."""

    model_config = ConfigDict(extra="forbid")

    layers: int | str | list[int]
    mixer: str
    options: dict[str, Any] = {}
    ffn: str | None = None
    ffn_options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _options_have_an_owner(self) -> PlanEntry:
        if self.ffn is None and self.ffn_options:
            raise ValueError("ffn_options without ffn")
        if self.mixer == "keep" and self.options:
            raise ValueError("keep leaves the teacher's attention as it is and has no options")
        return self

    def indices(self, num_layers: int, where: str) -> list[int]:
        """The entry's layers in rising order; `where` names the plan in errors."""
        return parse_layers(self.layers, num_layers, f"{where}: {self.mixer}")


def parse_entries(num_layers: int, to: str) -> list[PlanEntry]:
    """The entries of `--to`: a plan file's, or those of a text such as `rodimus:0-3,8-11,rat:4-7`.

    Raises:
        ConversionError: it is not understood, or does not name every layer once.
    """
    if to.endswith(YAML_SUFFIXES):
        file = Path(to).expanduser()
        if not file.is_file():
            raise ConversionError(f"--to {to}: no such file")
        entries = entries_from_yaml(file.read_text(encoding="utf-8"), f"--to {to}")
    else:
        entries = _entries_from_text(num_layers, to)
    check_cover(num_layers, entries, f"--to {to}")
    return entries


def _entries_from_text(num_layers: int, to: str) -> list[PlanEntry]:
    if ":" not in to and "," not in to:
        return [PlanEntry(layers=list(range(num_layers)), mixer=to.strip())]
    stretches: list[tuple[str, list[str]]] = []
    for part in to.split(","):
        name, colon, span = part.rpartition(":")
        if colon:
            stretches.append((name.strip(), [span]))
        elif stretches:
            stretches[-1][1].append(span)
        else:
            raise ConversionError(f"--to {to}: {part!r} says no layers; write NAME:LAYERS such as rodimus:0-7,rat:8-15")
    return [PlanEntry(layers=",".join(spans), mixer=name) for name, spans in stretches]


def entries_from_yaml(text: str, where: str) -> list[PlanEntry]:
    """A plan file's entries; `where` names the file in errors."""
    try:
        return TypeAdapter(list[PlanEntry]).validate_python(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConversionError(f"{where} is no YAML: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise ConversionError(f"{where}: {key} = {first['input']!r}: {first['msg']}") from None


def entries_to_yaml(entries: Iterable[PlanEntry]) -> str:
    """What `entries_from_yaml` reads; fields at their defaults are left out."""
    return yaml.safe_dump([entry.model_dump(exclude_defaults=True) for entry in entries], sort_keys=False)


def check_cover(num_layers: int, entries: list[PlanEntry], where: str) -> None:
    """Every layer stands in one entry.

    Raises:
        ConversionError: names the layers that stand in none or in two.
    """
    named = [i for entry in entries for i in entry.indices(num_layers, where)]
    if twice := sorted({i for i in named if named.count(i) > 1}):
        raise ConversionError(f"{where} names layer {format_layers(twice)} more than once")
    if missing := sorted(set(range(num_layers)) - set(named)):
        raise ConversionError(
            f"{where} leaves out layer {format_layers(missing)} of {num_layers}; add keep:{format_layers(missing)} "
            "if the attention shall stay there"
        )


def parse_layers(layers: int | str | list[int], num_layers: int, where: str) -> list[int]:
    """`3`, `[0, 3]`, `"0-3,8"` (both ends included) or `"all"` as indices in rising order.

    Raises:
        ConversionError: it is not understood, or there is no such layer.
    """
    if isinstance(layers, int):
        found = [layers]
    elif isinstance(layers, list):
        found = layers
    elif layers == "all":
        found = list(range(num_layers))
    else:
        found = []
        for part in layers.split(","):
            first, _, last = part.strip().partition("-")
            try:
                found += range(int(first), int(last or first) + 1)
            except ValueError:
                raise ConversionError(f"{where}: layers {layers!r} are not understood; write 0-3,8 or all") from None
    if not found:
        raise ConversionError(f"{where}: layers {layers!r} are none; write them in rising order, such as 0-3,8")
    if outside := [i for i in found if not 0 <= i < num_layers]:
        raise ConversionError(f"{where}: there is no layer {outside[0]}; the model has 0-{num_layers - 1}")
    return sorted(found)


def format_layers(layers: list[int]) -> str:
    """Indices in rising order as `parse_layers` reads them: `0-3,8`."""
    spans: list[list[int]] = []
    for i in layers:
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
