"""Small models trained on MQAR from nothing, one per mixer: how much each can hold and find again."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from linearize.convert.mixers import MIXERS
from linearize.convert.mixers.parts import CausalConv
from linearize.convert.plan import KEEP, LayerPlan, Plan, make_plan
from linearize.convert.size import cache_bytes
from linearize.convert.surgery import build_student
from linearize.distill.evaluate.mqar import Task, accuracy, answer_loss, make_batch
from linearize.distill.progress import meter

RECALL: dict[str, dict[str, Any]] = {
    "rat": {"chunk": 4},  # of pairs that share a summary only a few can be told apart
    "retnet": {"rope": False},  # a key is to match whatever its distance
    "gated-retention": {"rope": False},
    "rodimus-block": {"half_life": 128, "spread": 8},  # about as its released models begin
}
"""Options with which a mixer can recall, where its defaults, which are for conversions, do not."""


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        window: of the mixers that have one beside their recurrence; 0 tests the recurrence alone. This and `RECALL`
            hold where a plan says nothing else.
        conv: taps of a causal convolution behind the embedding, which puts a key beside its value; 0 for none. Without
            it the first layer must learn to look one token back before anything can be recalled.
        learning_rates: each is tried, best first; the best result counts, and one that reaches `enough` ends it.
        measure_every: steps between measurements of accuracy.
        enough: training stops at this accuracy.
        bfloat16: whether matrices multiply in bfloat16 (on a GPU; weights stay in float32).
    """

    layers: int = 2
    width: int = 128
    heads: int = 2
    window: int = 0
    conv: int = 4
    steps: int = 4_000
    batch_size: int = 64
    learning_rates: tuple[float, ...] = (3e-3, 1e-3)
    weight_decay: float = 0.1
    measure_every: int = 200
    enough: float = 0.99
    seed: int = 0
    bfloat16: bool = False


@dataclass(frozen=True)
class Outcome:
    """The best run of one mixer.

    Attributes:
        accuracy: number of pairs -> share of right answers.
        state_bytes: what a sequence of the task's length holds in the cache, in float32.
    """

    mixer: str
    accuracy: dict[int, float]
    learning_rate: float
    steps: int
    loss: float
    parameters: int
    state_bytes: int
    seconds: float

    @property
    def mean(self) -> float:
        return sum(self.accuracy.values()) / len(self.accuracy)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        return cls(**{**data, "accuracy": {int(pairs): share for pairs, share in data["accuracy"].items()}})


def small_model(to: str, task: Task, training: Training) -> PreTrainedModel:
    """A Llama with random weights whose attention is replaced as `to` says; nothing is calibrated.

    Raises:
        ConversionError: `to` is no plan for so many layers.
    """
    torch.manual_seed(training.seed)
    config = LlamaConfig(
        vocab_size=task.vocabulary,
        hidden_size=training.width,
        intermediate_size=2 * training.width,
        num_hidden_layers=training.layers,
        num_attention_heads=training.heads,
        max_position_embeddings=task.length,
        # What a previous-token head needs to form soon: biases of q and k, fast rotations, weights that are not tiny.
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000.0},
        initializer_range=training.width**-0.5,
        tie_word_embeddings=False,
    )
    plan = make_plan(training.layers, to)
    layers = tuple(_for_recall(layer, training.window) for layer in plan.layers)
    student = build_student(AutoModelForCausalLM.from_config(config), Plan(layers)).train()
    if training.conv:
        student.set_input_embeddings(_ConvolvedEmbedding(task.vocabulary, training))
    return student


class _ConvolvedEmbedding(nn.Embedding):
    """Token embeddings, each mixed with those before it channel by channel."""

    def __init__(self, vocabulary: int, training: Training) -> None:
        super().__init__(vocabulary, training.width)
        self.conv = CausalConv(training.width, training.conv, bias=False)
        nn.init.normal_(self.weight, std=training.width**-0.5)
        nn.init.uniform_(self.conv.weight, -(training.conv**-0.5), training.conv**-0.5)  # as torch starts convolutions

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.conv(super().forward(input), None, None)[0]


def _for_recall(layer: LayerPlan, window: int) -> LayerPlan:
    """The layer with `RECALL` and, where its mixer has and allows one, `window`; what the plan says stands."""
    if layer.mixer == KEEP:
        return layer
    options = {**RECALL.get(layer.mixer, {}), **layer.options}
    if "window" in options or "window" not in MIXERS[layer.mixer].Options.model_fields:
        return LayerPlan(layer.mixer, options)
    with_window = {**options, "window": window}
    try:
        MIXERS[layer.mixer].Options(**with_window)
    except ValidationError:
        return LayerPlan(layer.mixer, options)
    return LayerPlan(layer.mixer, with_window)


def train_on_mqar(to: str, task: Task, training: Training, device: str = "cpu") -> Outcome:
    """Train one model per learning rate and return the best.

    Args:
        to: a mixer, or a plan such as `rodimus:0,softmax:1`.
    """
    best: Outcome | None = None
    for rate in training.learning_rates:
        outcome = _train_once(to, task, training, rate, device)
        if best is None or outcome.mean > best.mean:
            best = outcome
        if best.mean >= training.enough:
            break
    assert best is not None, "Training.learning_rates is empty"
    return best


def _train_once(to: str, task: Task, training: Training, rate: float, device: str) -> Outcome:
    began = time.perf_counter()
    model: Any = small_model(to, task, training)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=training.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_cosine(training.steps))
    generator = torch.Generator(device)
    numbers = (*task.easier, *task.pairs)
    autocast: Any = contextlib.nullcontext()
    if training.bfloat16:
        autocast = torch.autocast(torch.device(device).type, torch.bfloat16)
    measured: dict[int, float] = {}
    with meter(f"mqar {to} at {rate:g}", training.steps) as progress:
        for step in range(1, training.steps + 1):
            generator.manual_seed(2 * (training.seed * 1_000_003 + step))
            ids, labels = make_batch(task, training.batch_size, numbers[step % len(numbers)], generator)
            with autocast:
                loss = answer_loss(model, ids, labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.update(step, ids.numel())
            if step % training.measure_every == 0 or step == training.steps:
                model.eval()
                with autocast:
                    measured = {pairs: accuracy(model, task, pairs) for pairs in task.pairs}
                model.train()
                if min(measured.values()) >= training.enough or not math.isfinite(loss.item()):
                    break
    return Outcome(
        mixer=to,
        accuracy=measured,
        learning_rate=rate,
        steps=step,
        loss=loss.item(),
        parameters=sum(p.numel() for p in model.parameters()),
        state_bytes=cache_bytes(model, task.length)[0],
        seconds=time.perf_counter() - began,
    )


def _warm_cosine(steps: int) -> Callable[[int], float]:
    """A tenth of the steps up, then down to a tenth of the rate by a cosine."""
    warm = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))

    return factor


def mqar_table(outcomes: list[Outcome]) -> str:
    """Markdown, best first."""
    pairs = sorted({n for outcome in outcomes for n in outcome.accuracy})
    heads = ["mixer", *(f"{n} pairs" for n in pairs), "state, bytes", "parameters", "rate", "steps", "seconds"]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for o in sorted(outcomes, key=lambda o: -o.mean):
        shares = [f"{o.accuracy[n]:.1%}" for n in pairs]
        chosen = "".join(f", {option} {value}" for option, value in RECALL.get(o.mixer, {}).items())
        cells = [
            o.mixer + chosen,
            *shares,
            f"{o.state_bytes:,}",
            f"{o.parameters:,}",
            f"{o.learning_rate:g}",
            str(o.steps),
        ]
        lines.append(f"| {' | '.join(cells)} | {o.seconds:.0f} |")
    return "\n".join(lines)
