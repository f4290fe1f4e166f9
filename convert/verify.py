"""The parity gate: what an exported student must satisfy, each line with its number.

Run as `python -m linearize.convert.verify DIR` it is a fresh process that shares nothing with the conversion.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from linearize.convert import model as _model  # noqa: F401  registers the student classes
from linearize.convert.checkpoint import load_tokenizer, read_tensor, tensor_names, weight_files
from linearize.convert.errors import ConversionError
from linearize.convert.export import PARITY, RECORD, file_digest, parity_of, parity_outputs, tensor_digest
from linearize.convert.layer_stream import LayerStream
from linearize.convert.plan import Plan

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative RMS difference of logits between two ways to compute the same thing. bfloat16 keeps 8 bits, so two
orders of summation differ by about 2^-8 per layer's output; the bound leaves room for deep models."""
ROUNDING_LIMIT = 0.1
"""The same for a model read at another precision than it was measured at: all its weights are rounded."""


@dataclass(frozen=True)
class Check:
    """One line of the gate."""

    name: str
    value: float
    limit: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # False for NaN


@dataclass(frozen=True)
class GateReport:
    """The gate's outcome."""

    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        lines = [{**asdict(c), "passed": c.passed} for c in self.checks]
        return {
            "passed": self.passed,
            "checks": [{**c, "value": None} if c["value"] != c["value"] else c for c in lines],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GateReport:
        values = [float("nan") if c["value"] is None else c["value"] for c in data["checks"]]
        return cls([Check(c["name"], v, c["limit"], c["detail"]) for c, v in zip(data["checks"], values, strict=True)])


def verify(directory: str | Path, device: str = "cpu") -> GateReport:
    """Run every check on an exported student, in this process.

    Raises:
        ConversionError: the folder is no exported student.
    """
    folder = Path(directory)
    record = _record(folder)
    checks = [*_file_checks(folder, record)]
    for dtype, limit in LIMITS.items():
        checks += _model_checks(folder, dtype, limit, device)
    return GateReport(checks)


def verify_streamed(directory: str | Path) -> GateReport:
    """The checks that need one block in memory at a time: files, tensors, reload = memory.

    Raises:
        ConversionError: the folder is no exported student.
    """
    folder = Path(directory)
    record = _record(folder)
    stored = json.loads((folder / "config.json").read_text())["dtype"]
    dtype: torch.dtype = getattr(torch, stored)
    memory = load_file(folder / PARITY)
    ids = memory.pop("input_ids")
    again = parity_of(LayerStream(folder, dtype).forward(ids), ids)
    worst = max(relative_error(again[name], expected) for name, expected in memory.items())
    limit = LIMITS.get(dtype, LIMITS[torch.bfloat16])
    return GateReport([*_file_checks(folder, record), Check(f"{stored}: reload = memory, streamed", worst, limit)])


def verify_in_fresh_process(directory: str | Path, streamed: bool = False) -> GateReport:
    """`verify`, or `verify_streamed`, in a new Python process.

    Raises:
        ConversionError: the process could not finish; its last line of error is in the message.
    """
    command = [sys.executable, "-m", "linearize.convert.verify", str(directory), *(["--stream"] if streamed else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return GateReport.from_json(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise ConversionError(f"the parity gate could not run on {directory}: {lines[-1]}") from None


def _record(folder: Path) -> dict[str, Any]:
    if not (folder / RECORD).is_file():
        raise ConversionError(f"{folder} is not an exported student: it has no {RECORD}")
    return json.loads((folder / RECORD).read_text())


# ---------------------------------------------------------------------- files and tensors


def _file_checks(folder: Path, record: dict[str, Any]) -> Iterator[Check]:
    changed = [name for name, digest in record["files"].items() if _digest(folder / name) != digest]
    yield Check("tokenizer and licence files as the teacher's", len(changed), 0, ", ".join(changed))
    try:
        load_tokenizer(folder)
        yield Check("tokenizer loads", 0, 0)
    except ConversionError as error:
        yield Check("tokenizer loads", 1, 0, str(error))

    broken, found, infinite = [], set(), []
    for file in weight_files(folder):
        for name in tensor_names(file):
            tensor = read_tensor(file, name)
            found.add(name)
            if not bool(torch.isfinite(tensor).all()):
                infinite.append(name)
            if name in record["digest"] and tensor_digest(tensor) != record["digest"][name]:
                broken.append(name)
    unaccounted = found ^ set(record["origin"])
    yield Check("every tensor accounted for", len(unaccounted), 0, ", ".join(sorted(unaccounted)[:3]))
    yield Check("all tensors finite", len(infinite), 0, ", ".join(infinite[:3]))
    plan = Plan.from_config(json.loads((folder / "config.json").read_text())["linearize"]["layers"])
    trained = set(record.get("trained", ()))  # stages that train whole blocks train kept layers too
    for index in plan.kept:
        part, replaced = f".{index}.", f".{index}.mlp." if plan.layers[index].ffn else None
        mine = [n for n in record["origin"] if part in n and "layers" in n and not (replaced and replaced in n)]
        broken += [n for n in mine if record["origin"][n] != "copied" and n not in trained]
    yield Check("kept tensors equal the teacher's bit for bit", len(broken), 0, ", ".join(broken[:3]))


def _digest(file: Path) -> str | None:
    return file_digest(file) if file.is_file() else None


# ---------------------------------------------------------------------- behaviour


def _model_checks(folder: Path, dtype: torch.dtype, limit: float, device: str) -> Iterator[Check]:
    label = str(dtype).removeprefix("torch.")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=_implementation(folder))
    model = loaded.to(device).eval()
    memory = load_file(folder / PARITY)
    ids = memory.pop("input_ids").to(device)
    again = parity_outputs(model, ids)
    stored = json.loads((folder / "config.json").read_text())["dtype"]
    reload_limit = limit if stored == label else ROUNDING_LIMIT
    worst = max(relative_error(again[name], expected) for name, expected in memory.items())
    yield Check(f"{label}: reload = memory", worst, reload_limit)
    with torch.no_grad():
        full = model(input_ids=ids, use_cache=False).logits
        for name, compute in _equivalences(model, ids).items():
            try:
                yield Check(f"{label}: {name}", relative_error(compute(), full[:1] if "batch" in name else full), limit)
            except Exception as error:
                yield Check(f"{label}: {name}", float("nan"), limit, f"{type(error).__name__}: {error}")
    if dtype is torch.float32:
        yield from _generation_checks(model, ids[:1, :24])


def _equivalences(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    tokens = ids.shape[1]

    def cached(pieces: list[int]) -> torch.Tensor:
        cache, logits, start = model.new_cache(), [], 0
        for size in pieces:
            piece = ids[:, start : start + size]
            logits.append(model(input_ids=piece, past_key_values=cache, use_cache=True).logits)
            start += size
        return torch.cat(logits, 1)

    def padded() -> torch.Tensor:
        pad = 13
        longer = torch.cat([ids.new_zeros(ids.shape[0], pad), ids], 1)
        mask = torch.ones_like(longer)
        mask[:, :pad] = 0
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        output = model(input_ids=longer, attention_mask=mask, position_ids=positions, use_cache=False)
        return output.logits[:, pad:]

    first = tokens // 2 + 3
    return {
        "cached = uncached, in three pieces": lambda: cached([first, 1, tokens - first - 1]),
        "token by token = parallel": lambda: cached([1] * tokens),
        "left-padded = unpadded": padded,
        "batch 1 = batch n": lambda: model(input_ids=ids[:1], use_cache=False).logits,
    }


def _generation_checks(model: Any, prompt: torch.Tensor) -> Iterator[Check]:
    expected = prompt
    with torch.no_grad():
        for _ in range(8):
            step = model(input_ids=expected, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, step], 1)
    mask = torch.ones_like(prompt)
    for name, options in (("greedy", {}), ("static cache", {"cache_implementation": "static"})):
        try:
            made = model.generate(
                prompt, attention_mask=mask, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0,
                eos_token_id=None, **options,
            )  # fmt: skip
            wrong = int((made != expected).sum())
            yield Check(f"generate(), {name} = argmax of uncached", wrong, 0)
        except Exception as error:
            yield Check(f"generate(), {name} = argmax of uncached", float("nan"), 0, f"{type(error).__name__}: {error}")


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """`‖value - expected‖ / ‖expected‖` in float64; NaN if either is not finite."""
    value, expected = value.double().cpu(), expected.double().cpu()
    return float((value - expected).norm() / expected.norm())


def _implementation(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    return "eager" if config.get("attn_logit_softcapping") is not None else "sdpa"


if __name__ == "__main__":
    print(json.dumps((verify_streamed if "--stream" in sys.argv[2:] else verify)(sys.argv[1]).to_json()))
