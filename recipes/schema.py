"""The typed recipe: everything that decides a conversion. A Python file or YAML is its written form."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from linearize.convert.errors import ConversionError
from linearize.distill.data import Documents
from linearize.distill.loss_log import Tracker
from linearize.distill.stages import STAGES, AnyStage

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
    data: str | dict[str, float] | None = Field(
        None, description="text, JSONL, folder or dataset, or several with shares; none: Python's standard library"
    )
    documents: Documents = Field(
        "joined",
        description="joined: rows are running text; packed: documents do not see each other; padded: one a row",
    )
    streaming: bool = Field(False, description="read documents as they are needed, never all of them")
    token_cache: bool = Field(True, description="keep long texts' tokens in the user's cache folder")
    context: int = Field(512, ge=2, description="tokens per training sequence")
    heldout_context: int | None = Field(
        None, ge=2, description="tokens per measured sequence; none: the teacher's longest, at most 1024"
    )
    heldout_tokens: int = Field(
        36_864, ge=2, description="held-out tokens that are measured, spread evenly over the held-out text"
    )
    calibration_tokens: int = Field(4_096, ge=0, description="tokens for the closed-form start; 0 skips it")
    stages: list[AnyStage] | None = Field(
        None, description="training, in order; none: attention transfer and LoRA with the mixer's usual settings"
    )
    control: bool = Field(True, description="also train the window alone at equal tokens, to compare with")
    accumulation: int = Field(1, ge=1, description="passes over a batch, each a part of it, to need less memory")
    gradient_checkpointing: bool = Field(False, description="make activations again in the backward pass")
    compile: bool = Field(False, description="run mixers, attention and MLPs through torch.compile while they train")
    report_to: list[Tracker] = Field(
        default_factory=list, description="trackers of the losses beside losses.csv: tensorboard, wandb, trackio"
    )
    seed: int = Field(0, ge=0, description="of new tensors, adapters and the order of the data")
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto takes a GPU when there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of the student; auto: float32 on the CPU, bfloat16 on a GPU"
    )

    @field_validator("stages")
    @classmethod
    def _named_apart(cls, stages: list[AnyStage] | None) -> list[AnyStage] | None:
        labels = [stage.label for stage in stages or ()]
        for label in labels:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", label) or label.startswith("control"):
                raise ValueError(f"a stage is named {label!r}; use letters, digits, - and _, and not 'control...'")
            if labels.count(label) > 1:
                raise ValueError(f"two stages are named {label!r}; give each a name of its own")
        return stages


def load_recipe(source: str | Path) -> Recipe:
    """Read a recipe: a built-in one by name, a `.yaml` file, or a Python file that defines `recipe = Recipe(...)`.

    A Python recipe is run; that is code of the user's own.

    Raises:
        ConversionError: there is none, or it is invalid; names the key.
    """
    from linearize.recipes.builtin import builtin_file

    path = builtin_file(str(source)) or Path(source)
    if not path.is_file():
        raise ConversionError(f"--recipe {source}: no such file, and no built-in recipe (`linearize recipes ls`)")
    try:
        if path.suffix == ".py":
            return _run_recipe(path, str(source))
        return Recipe.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except yaml.YAMLError as error:
        raise ConversionError(f"--recipe {source} is no YAML: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        raise ConversionError(f"--recipe {source}: {first_problem(error)}") from None


def _run_recipe(path: Path, source: str) -> Recipe:
    spec = importlib.util.spec_from_file_location("user_recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ValidationError, ConversionError):
        raise
    except Exception as error:
        raise ConversionError(f"--recipe {source} does not run: {type(error).__name__}: {error}") from None
    recipe = getattr(module, "recipe", None)
    if not isinstance(recipe, Recipe):
        raise ConversionError(f"--recipe {source} does not define `recipe = Recipe(...)`")
    return recipe


def first_problem(error: ValidationError) -> str:
    """One line for the first thing pydantic found: key, value, reason."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in STAGES]
    key = ".".join(where) or error.title
    if first["type"].startswith("union_tag"):
        return f"{key}.kind = {first['ctx'].get('tag')!r}: there is no such stage; there are {', '.join(STAGES)}"
    if first["type"] == "extra_forbidden":
        return f"{key} = {first['input']!r}: there is no such key"
    return f"{key} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"


def parse_tokens(text: str) -> int:
    """`200000`, `200k` or `2M` as a number.

    Raises:
        ConversionError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmb]?)", text.strip().lower().replace("_", ""))
    if match is None:
        raise ConversionError(f"--tokens {text!r} is no number; write 200000, 200k or 2M")
    return int(float(match[1]) * _UNITS[match[2]])
