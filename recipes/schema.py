"""The typed recipe: everything that decides a conversion. YAML is its written form."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from linearize.convert.errors import ConversionError
from linearize.distill.stages.lora import Lora
from linearize.distill.stages.transfer import Transfer

_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


class Recipe(BaseModel):
    """A conversion from teacher to exported student."""

    model_config = ConfigDict(extra="forbid")

    teacher: str = Field("llama", description="bundled name, model folder or Hub id")
    revision: str | None = Field(None, description="Hub revision of the teacher")
    to: str = Field(
        "rodimus",
        description="mixer that replaces softmax attention (`linearize list`), rodimus:0-7,rat:8-15 or plan.yaml",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="options of the mixers; rat.chunk for one of them"
    )
    ffn: str | None = Field(None, description="channel mixer that replaces the MLPs (`linearize list`)")
    ffn_options: dict[str, Any] = Field(default_factory=dict, description="options of the channel mixer")
    keep_softmax: str | None = Field(None, description="layers that keep their attention: '0,3' or '25%'")
    data: str | None = Field(None, description="text, JSONL, folder or dataset; none: Python's standard library")
    context: int = Field(512, ge=2, description="tokens per training sequence")
    heldout_context: int | None = Field(
        None, ge=2, description="tokens per measured sequence; none: the teacher's longest, at most 1024"
    )
    heldout_tokens: int = Field(
        36_864, ge=2, description="held-out tokens that are measured, spread evenly over the held-out text"
    )
    calibration_tokens: int = Field(4_096, ge=0, description="tokens for the closed-form start; 0 skips it")
    transfer: Transfer | None = Field(None, description="attention transfer; none: the mixer's usual settings")
    lora: Lora | None = Field(None, description="LoRA with cross-entropy and KL; none: the mixer's usual settings")
    control: bool = Field(True, description="also train the window alone at equal tokens, to compare with")
    seed: int = Field(0, ge=0, description="of new tensors, adapters and the order of the data")
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto takes a GPU when there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of the student; auto: float32 on the CPU, bfloat16 on a GPU"
    )

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_recipe(file: str | Path) -> Recipe:
    """Read a recipe: a `.yaml` file, or a Python file that defines `recipe = Recipe(...)`.

    A Python recipe is run; that is code of the user's own.

    Raises:
        ConversionError: the file is missing or invalid; names the key.
    """
    path = Path(file)
    if not path.is_file():
        raise ConversionError(f"--recipe {file}: no such file")
    if path.suffix == ".py":
        spec = importlib.util.spec_from_file_location("user_recipe", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        recipe = getattr(module, "recipe", None)
        if not isinstance(recipe, Recipe):
            raise ConversionError(f"--recipe {file} does not define `recipe = Recipe(...)`")
        return recipe
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return Recipe.model_validate(data)
    except yaml.YAMLError as error:
        raise ConversionError(f"--recipe {file} is no YAML: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        raise ConversionError(f"--recipe {file}: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """One line for the first thing pydantic found: key, value, reason."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}"


def parse_tokens(text: str) -> int:
    """`200000`, `200k` or `2M` as a number.

    Raises:
        ConversionError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmb]?)", text.strip().lower().replace("_", ""))
    if match is None:
        raise ConversionError(f"--tokens {text!r} is no number; write 200000, 200k or 2M")
    return int(float(match[1]) * _UNITS[match[2]])
