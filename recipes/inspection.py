"""What can be said without training: plans, tensors, mixers; and trying a student out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from linearize.convert.attention_spec import AttentionSpec, describe_attention, find_layers
from linearize.convert.channel_mixers import CHANNEL_MIXERS, ChannelMixer
from linearize.convert.checkpoint import check_source, checkpoint_tensors, load_tokenizer
from linearize.convert.errors import ConversionError
from linearize.convert.export import RECORD
from linearize.convert.mixers import MIXERS, Mixer
from linearize.convert.plan import ALIASES, Plan, make_plan
from linearize.convert.size import cache_bytes
from linearize.convert.surgery import build_student, new_parameters, student_mixers
from linearize.recipes.defaults import stages_of
from linearize.recipes.estimate import estimate
from linearize.recipes.schema import Recipe
from linearize.recipes.surgery_report import measure_surgery
from linearize.recipes.teachers import resolve_teacher


@dataclass(frozen=True)
class Inspection:
    """What a conversion would do to a teacher's tensors.

    Attributes:
        tensors: name -> (shape, "copied" | "adapted by LoRA" | "created and trained").
        surgery: a `SurgeryError` as JSON; None when it was not measured.
    """

    teacher: str
    family: str
    attention: dict[str, Any]
    plan: list[dict[str, Any]]
    tensors: dict[str, tuple[list[int], str]]
    parameters: dict[str, int]
    state_bytes: dict[str, int]
    kv_bytes: dict[str, int]
    surgery: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        width = max(map(len, self.tensors))
        lines = [f"{self.teacher}: {self.family}"]
        lines += [f"  {key:16s} {value}" for key, value in self.attention.items()]
        lines += ["layers"]
        lines += [f"  {i:3d}  {layer}" for i, layer in enumerate(Plan.from_config(self.plan).layers)]
        lines += ["tensors"]
        lines += [f"  {name:{width}s}  {shape!s:18s} {fate}" for name, (shape, fate) in self.tensors.items()]
        lines += [f"parameters: {', '.join(f'{count:,} {name}' for name, count in self.parameters.items())}"]
        lines += [
            f"bytes per sequence at {int(c):,} tokens: {self.state_bytes[c]:,} against {self.kv_bytes[c]:,} of KV cache"
            for c in self.state_bytes
        ]
        return "\n".join([*lines, *self._surgery_lines()])

    def _surgery_lines(self) -> list[str]:
        if self.surgery is None:
            return []
        s = self.surgery

        def lost(layer: int) -> str:
            share = s["residuals"].get(layer)
            return "" if share is None else f"; its form cannot hold {share:.1%} of the logits' variance"

        return [
            f"right after surgery, on {s['tokens']:,} held-out tokens, untrained",
            *(f"  layer {i:3d}  attention output off by {e:8.2%}{lost(i)}" for i, e in s["layers"].items()),
            f"  logits     off by {s['logits']:.2%}; KL {s['kl']:.4f} nats per token; "
            f"perplexity {s['perplexity_ratio']:.3f} x the teacher's",
        ]


def inspect_teacher(
    name: str,
    to: str,
    keep_softmax: str | None = None,
    options: dict[str, Any] | None = None,
    ffn: str | None = None,
    ffn_options: dict[str, Any] | None = None,
    errors: bool = False,
    data: str | None = None,
) -> Inspection:
    """Look at a teacher's configuration and plan its conversion.

    Args:
        errors: whether to read the weights too, and measure on `data` how far the student starts from its teacher.
    """
    teacher = resolve_teacher(name)
    config = check_source(teacher.folder)
    plan = make_plan(config.num_hidden_layers, to, keep_softmax, ffn=ffn, ffn_options=ffn_options, **(options or {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    student = build_student(model, plan)
    names = {module: name for name, module in student.named_modules()}
    fates = dict.fromkeys(checkpoint_tensors(student), "copied")
    for mixer in student_mixers(student):
        prefix = names[mixer]
        fates |= {f"{prefix}.{projection}.weight": "adapted by LoRA" for projection in mixer.spec.projection_names}
    fates |= dict.fromkeys(new_parameters(student), "created and trained")
    tensors = {n: (list(t.shape), fates[n]) for n, t in checkpoint_tensors(student).items()}
    counts: dict[str, int] = {}
    for name_, tensor in checkpoint_tensors(student).items():
        counts[fates[name_]] = counts.get(fates[name_], 0) + tensor.numel()
    layers, attention_name = find_layers(model, config)
    sizes = {str(c): cache_bytes(student, c) for c in (1024, 32768)}
    return Inspection(
        teacher=teacher.label,
        family=config.model_type,
        attention=_describe(describe_attention(getattr(layers[0], attention_name), config)),
        plan=plan.to_config(),
        tensors=tensors,
        parameters=counts,
        state_bytes={c: state for c, (state, _) in sizes.items()},
        kv_bytes={c: kv for c, (_, kv) in sizes.items()},
        surgery=measure_surgery(teacher, plan, data).to_json() if errors else None,
    )


def _describe(spec: AttentionSpec) -> dict[str, Any]:
    return {key: value for key, value in asdict(spec).items() if key != "rotary"}


def describe_recipe(recipe: Recipe) -> str:
    """What `--dry-run` prints: costs, the plan, the stages' settings."""
    report = inspect_teacher(
        recipe.teacher, recipe.to, recipe.keep_softmax, recipe.options, recipe.ffn, recipe.ffn_options
    )
    layers = [f"  {i:3d}  {layer}" for i, layer in enumerate(Plan.from_config(report.plan).layers)]
    counts = ", ".join(f"{count:,} {name}" for name, count in report.parameters.items())
    settings = {stage.label: stage.model_dump(exclude={"kind", "name", "tokens"}) for stage in stages_of(recipe)}
    return "\n".join(
        [
            estimate(recipe).to_text(),
            "layers",
            *layers,
            f"parameters: {counts}",
            *(f"{label}: {', '.join(f'{k}={v}' for k, v in chosen.items())}" for label, chosen in settings.items()),
            f"data: {recipe.data or 'the standard library of this Python'}",
            "nothing was written (dry run)",
        ]
    )


def mixer_table() -> dict[str, dict[str, Any]]:
    """Every mixer, channel mixer and alias: its kind, its first line of documentation and its options."""
    table = {name: _entry("mixer", mixer) for name, mixer in sorted(MIXERS.items())}
    for alias, turns in ALIASES.items():
        about = f"in turn: {', '.join(map(str, turns))}"
        table[alias] = {"kind": "alias", "about": about, "options": {}}
    return table | {name: _entry("channel mixer", mixer) for name, mixer in sorted(CHANNEL_MIXERS.items())}


def _entry(kind: str, mixer: type[Mixer] | type[ChannelMixer]) -> dict[str, Any]:
    return {
        "kind": kind,
        "about": (mixer.__doc__ or "").strip().splitlines()[0],
        "options": {
            option: {
                "default": None if field.is_required() else field.get_default(call_default_factory=True),
                "description": field.description or "",
            }
            for option, field in mixer.Options.model_fields.items()
        },
    }


def continue_prompt(directory: Path, prompt: str, max_new_tokens: int, temperature: float, seed: int) -> str:
    """Generate with an exported student; returns the continuation alone."""
    if not (directory / RECORD).is_file():
        raise ConversionError(f"{directory} is not an exported student: it has no {RECORD}")
    tokenizer = load_tokenizer(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    torch.manual_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    made = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling)
    return tokenizer.decode(made[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
