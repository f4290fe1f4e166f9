"""The teacher at work: what its attention, or its blocks, read and made at every layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from linearize.convert.attention_spec import find_layers
from linearize.convert.mixers.base import Mixer, Rope
from linearize.convert.surgery import student_mixers
from linearize.distill.compiled import as_written
from linearize.distill.override import override
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


def watch_attention(reference: Reference, input_ids: torch.Tensor, heads: bool = False) -> dict[int, Seen]:
    """Run the teacher over `input_ids` `[B, T]`; what the attention saw in each layer that has a mixer now.

    Args:
        heads: whether its heads are wanted too, which hooks inside the attention take.
    """
    seen: dict[int, Seen] = {}
    with ExitStack() as stack, reference.model() as model, as_written() if heads else nullcontext():
        inside = model is reference.student
        layers, name = find_layers(model, model.config)
        mixers = student_mixers(reference.student)
        for mixer in mixers:
            index = mixer.layer_idx
            attention = mixer.attention if inside else getattr(layers[index], name)
            watch(stack, attention, lambda call, index=index: seen.__setitem__(index, call))  # type: ignore[misc]
            if heads:
                _watch_heads(stack, getattr(attention, mixer.spec.output_name), seen, mixer)
            if mixer.reads_stream:
                _watch_stream(stack, layers[index], seen, index)
        for block in layers[max((mixer.layer_idx for mixer in mixers), default=0) :]:  # read by no mixer
            _skip_mlp(stack, block)
        last_hidden(model, input_ids)
    return seen


def _watch_heads(stack: ExitStack, projection: nn.Module, seen: dict[int, Seen], mixer: Mixer) -> None:
    projected: list[torch.Tensor] = []

    def add() -> None:
        if mixer.layer_idx in seen:
            seen[mixer.layer_idx].heads = projected[0].unflatten(-1, (mixer.spec.num_heads, -1))

    stack.callback(projection.register_forward_pre_hook(lambda _, args: projected.append(args[0])).remove)
    stack.callback(add)


def _skip_mlp(stack: ExitStack, block: nn.Module) -> None:
    """Until `stack` closes, a dense MLP gives back what it reads: for blocks whose output nobody looks at."""
    mlp = getattr(block, "mlp", None)
    if not isinstance(getattr(mlp, "down_proj", None), nn.Linear):
        return
    assert mlp is not None
    stack.enter_context(override(mlp, "forward", lambda hidden_states: hidden_states))


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
