"""The teacher at work: what its attention, or its blocks, read and made at every layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from linearize.convert.attention_spec import find_layers
from linearize.convert.mixers.base import Mixer, Rope
from linearize.convert.surgery import student_mixers
from linearize.distill.reference import Reference, last_hidden


@dataclass
class Seen:
    """One call of a module.

    Attributes:
        hidden_states: `[B, T, D]` that it read.
        arguments: the call's other arguments, by name.
        output: `[B, T, D]` that it made.
        heads: of an attention, `[B, T, H, V]` before its output projection.
        stream: of the attention under a mixer that `reads_stream`, `[B, T, D]` that entered its block.
    """

    hidden_states: torch.Tensor
    arguments: dict[str, Any]
    output: torch.Tensor
    heads: torch.Tensor | None = None
    stream: torch.Tensor | None = None

    @property
    def rope(self) -> Rope | None:
        """cos and sin of the tokens' positions."""
        return self.arguments.get("position_embeddings")

    def mix(self, mixer: Mixer) -> torch.Tensor:
        """The heads `[B, T, H, V]` of a mixer that reads the same."""
        with mixer.in_stream(self.stream):
            return mixer.mix(self.hidden_states, self.rope, None, None, self.cu_seqlens)[0]

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """Borders of the documents, where rows are not running text."""
        return self.arguments.get("cu_seq_lens_q")


def watch_attention(reference: Reference, input_ids: torch.Tensor) -> dict[int, Seen]:
    """Run the teacher over `input_ids` `[B, T]`; what the attention saw in each layer that has a mixer now."""
    seen: dict[int, Seen] = {}
    with ExitStack() as stack, reference.model() as model:
        inside = model is reference.student
        layers, name = find_layers(model, model.config)
        for mixer in student_mixers(reference.student):
            index = mixer.layer_idx
            attention = mixer.attention if inside else getattr(layers[index], name)
            watch(stack, attention, lambda call, index=index: seen.__setitem__(index, call))  # type: ignore[misc]
            projected: list[torch.Tensor] = []
            projection = getattr(attention, mixer.spec.output_name)
            handle = projection.register_forward_pre_hook(lambda _, args, into=projected: into.append(args[0]))
            stack.callback(handle.remove)
            stack.callback(_add_heads, seen, index, projected, mixer.spec.num_heads)
            if mixer.reads_stream:
                _watch_stream(stack, layers[index], seen, index)
        last_hidden(model, input_ids)
    return seen


def _add_heads(seen: dict[int, Seen], index: int, projected: list[torch.Tensor], num_heads: int) -> None:
    if index in seen:
        seen[index].heads = projected[0].unflatten(-1, (num_heads, -1))


def _watch_stream(stack: ExitStack, block: nn.Module, seen: dict[int, Seen], index: int) -> None:
    entered: list[torch.Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    def add() -> None:
        if index in seen:
            seen[index].stream = entered[0]

    stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
    stack.callback(add)


def watch_blocks(reference: Reference, input_ids: torch.Tensor) -> list[Seen]:
    """Run the teacher over `input_ids` `[B, T]`; what each decoder block read and made."""
    seen: list[Seen] = []
    with ExitStack() as stack, reference.model() as model:
        for block in find_layers(model, model.config)[0]:
            watch(stack, block, seen.append)
        last_hidden(model, input_ids)
    return seen


def watch(stack: ExitStack, module: nn.Module, found: Callable[[Seen], None]) -> None:
    """Until `stack` closes, give every call of the module to `found`."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        rest = dict(kwargs)
        hidden_states = args[0] if args else rest.pop("hidden_states")
        found(Seen(hidden_states, rest, output[0] if isinstance(output, tuple) else output))

    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
