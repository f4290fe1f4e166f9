"""FLOPs that a training step needs, per token: what any implementation must compute, not what this one does.

Counted, 2 per multiply-add:
    linear   every `nn.Linear` of the blocks, adapters too: forward, the input's gradient where something before it
             trains, the weight's gradient where the weight trains
    mixing   softmax over the keys that are seen, and recurrences by `Mixer.flops`: forward, and twice that backward
    head     products with the vocabulary: forward, the input's gradient, the weight's gradient where it trains
Not counted: elementwise work, norms, the optimizer, anything that is computed a second time, and the gradient of the
input of a small matrix behind a convolution (rodimus), which is taken for one that reads the block's input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from linearize.convert.attention_spec import AttentionSpec, describe_attention, find_layers, mean_keys
from linearize.convert.mixers import Mixer
from linearize.convert.surgery import student_mixers


@dataclass(frozen=True)
class Flops:
    """FLOPs per token; see the module's docstring."""

    linear: float = 0.0
    mixing: float = 0.0
    head: float = 0.0

    @property
    def total(self) -> float:
        return self.linear + self.mixing + self.head

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.linear + other.linear, self.mixing + other.mixing, self.head + other.head)

    def to_json(self) -> dict[str, float]:
        return {**asdict(self), "total": self.total}


def teacher_forward(student: PreTrainedModel, context: int, head: bool = True, last_mlp: bool = True) -> Flops:
    """The teacher inside a student, over sequences of `context` tokens.

    Args:
        last_mlp: whether the last block's output is wanted, not only its attention's.
    """
    blocks, name = find_layers(student, student.config)
    linear = mixing = 0.0
    for index, block in enumerate(blocks):
        attention, spec = _attention(block, name, student)
        linear += sum(2 * module.weight.numel() for _, module in _linears(attention, adapters=False))
        if last_mlp or index + 1 < len(blocks):
            linear += sum(2 * module.weight.numel() for _, module in _outside(block, name, adapters=False))
        mixing += _softmax(spec, context)
    return Flops(linear, mixing, _head(student, context) if head else 0.0)


def student_forward(student: PreTrainedModel, context: int, head: bool = True) -> Flops:
    """The student with its adapters."""
    blocks, name = find_layers(student, student.config)
    linear = mixing = 0.0
    for block in blocks:
        linear += sum(2 * module.weight.numel() for _, module in _linears(block))
        mixing += _mixing(getattr(block, name), student, context)
    return Flops(linear, mixing, _head(student, context) if head else 0.0)


def student_backward(student: PreTrainedModel, context: int) -> Flops:
    """Gradients of what trains now, from the loss of the predictions."""
    blocks, name = find_layers(student, student.config)
    before = _trains(student.get_input_embeddings())
    linear = mixing = 0.0
    for block in blocks:
        attention = getattr(block, name)
        linear += _backward_of_linears(attention, _attention(block, name, student)[1], before)
        before |= _trains(attention)
        mixing += 2 * _mixing(attention, student, context) if before else 0.0
        for _, module in _outside(block, name):
            before |= module.weight.requires_grad
            linear += 2 * module.weight.numel() * (int(before) + int(module.weight.requires_grad))
    trains = _trains(student.get_output_embeddings())
    return Flops(linear, mixing, _head(student, context) * (int(before) + int(trains)))


def transfer_step(student: PreTrainedModel, context: int) -> Flops:
    """The teacher up to its last attention, and every mixer forward and backward on inputs without gradient."""
    total = teacher_forward(student, context, head=False, last_mlp=False)
    for mixer in student_mixers(student):
        linear = 2.0 * sum(module.weight.numel() for _, module in _linears(mixer))
        linear += _backward_of_linears(mixer, mixer.spec, False)
        total += Flops(linear, 3 * _mixing(mixer, student, context))
    return total


def distillation_step(student: PreTrainedModel, context: int, teacher: bool) -> Flops:
    """The student forward and backward; beside it the teacher forward."""
    step = student_forward(student, context) + student_backward(student, context)
    return step + teacher_forward(student, context) if teacher else step


def _backward_of_linears(attention: nn.Module, spec: AttentionSpec, input_trains: bool) -> float:
    """Of an attention or mixer. Layers that read the block's input pass a gradient on only where it is wanted."""
    flops = 0.0
    for path, module in _linears(attention):
        reads_input = module.in_features == spec.hidden_size and not path.startswith(spec.output_name)
        wanted = input_trains or (_trains(attention) and not reads_input)
        flops += 2 * module.weight.numel() * (int(wanted) + int(module.weight.requires_grad))
    return flops


def _attention(block: nn.Module, name: str, student: PreTrainedModel) -> tuple[nn.Module, AttentionSpec]:
    """The teacher's attention of a block."""
    module: Any = getattr(block, name)
    if isinstance(module, Mixer):
        return module.attention, module.spec
    return module, describe_attention(module, student.config)


def _mixing(attention: nn.Module, student: PreTrainedModel, context: int) -> float:
    """One token's forward pass of everything in an attention or mixer but its linear layers."""
    if not isinstance(attention, Mixer):
        return _softmax(describe_attention(attention, student.config), context)
    return attention.flops(context) - sum(2 * module.weight.numel() for _, module in _linears(attention))


def _softmax(spec: AttentionSpec, context: int) -> float:
    return 4 * spec.num_heads * spec.head_dim * mean_keys(context, spec.sliding_window)


def _head(student: PreTrainedModel, context: int) -> float:
    """The last token of a sequence predicts nothing that is known."""
    weight: Any = student.get_output_embeddings().weight
    return 2 * weight.numel() * (context - 1) / context


def _linears(module: nn.Module, adapters: bool = True) -> Iterator[tuple[str, nn.Linear]]:
    for path, child in module.named_modules():
        if isinstance(child, nn.Linear) and (adapters or "lora_" not in path):
            yield path, child


def _outside(block: nn.Module, name: str, adapters: bool = True) -> Iterator[tuple[str, nn.Linear]]:
    """A block's linear layers outside its attention."""
    return ((p, m) for p, m in _linears(block, adapters) if not p.startswith(f"{name}."))


def _trains(module: Any) -> bool:
    return any(p.requires_grad for p in module.parameters())
