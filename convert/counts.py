"""Parameters, FLOPs and state of a model under any plan, from shapes alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from linearize.convert.attention_spec import describe_attention, find_layers, mean_keys
from linearize.convert.channel_mixers import ChannelMixer
from linearize.convert.mixers import Mixer
from linearize.convert.plan import Plan
from linearize.convert.size import cache_bytes
from linearize.convert.surgery import build_student, new_parameters


@dataclass(frozen=True)
class Counts:
    """What a model costs.

    Attributes:
        parameters: all of them, tied ones once.
        new_parameters: those among them that the teacher does not have.
        embedding_parameters: those of the token embedding and, where it is not tied, of the head.
        flops_per_token: of one token's forward pass, 2 per multiply-add: the mean over a sequence of `context` tokens,
            softmax counted over the keys it sees. Elementwise work is left out.
        state_bytes: what one sequence of `context` tokens holds while it is generated.
        kv_bytes: what the teacher would hold.
    """

    context: int
    parameters: int
    new_parameters: int
    embedding_parameters: int
    flops_per_token: float
    state_bytes: int
    kv_bytes: int

    @property
    def training_flops_per_token(self) -> float:
        """Forward and backward: three times the forward pass."""
        return 3 * self.flops_per_token

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "training_flops_per_token": self.training_flops_per_token}


def count(model: PreTrainedModel | PreTrainedConfig, plan: Plan | None = None, context: int = 1024) -> Counts:
    """Count a teacher converted as `plan` says.

    Args:
        model: a decoder's configuration, a decoder, or a student. Tensors are not read.
        plan: what becomes of it; None counts it as it is.
        context: tokens of the sequence whose mean token is counted.

    Raises:
        ConversionError: the plan does not fit, or the model is no decoder that converts.
    """
    counted: Any = model
    if isinstance(model, PreTrainedConfig) or plan is not None:
        with torch.device("meta"):
            config = model if isinstance(model, PreTrainedConfig) else model.config
            counted = AutoModelForCausalLM.from_config(config)
            counted = counted if plan is None else build_student(counted, plan)
    state, kv = cache_bytes(counted, context)
    embedding, head = counted.get_input_embeddings().weight, counted.get_output_embeddings().weight
    ends = {id(p): p for p in (embedding, head)}
    return Counts(
        context=context,
        parameters=sum(p.numel() for p in counted.parameters()),
        new_parameters=sum(p.numel() for p in new_parameters(counted).values()),
        embedding_parameters=sum(p.numel() for p in ends.values()),
        flops_per_token=_body_flops(counted, context) + 2 * head.numel(),
        state_bytes=state,
        kv_bytes=kv,
    )


def _body_flops(model: PreTrainedModel, context: int) -> float:
    """Everything but the embedding, which is a look-up, and the head."""
    layers, name = find_layers(model, model.config)
    flops, counted = (
        0.0,
        {id(p) for end in (model.get_input_embeddings(), model.get_output_embeddings()) for p in end.parameters()},
    )
    for block in layers:
        attention = getattr(block, name)
        parts: list[nn.Module] = [attention, *(m for m in block.modules() if isinstance(m, ChannelMixer))]
        for part in parts:
            if isinstance(part, Mixer):
                flops += part.flops(context)
            elif isinstance(part, ChannelMixer):
                flops += part.flops()
            else:
                spec = describe_attention(part, model.config)
                keys = mean_keys(context, spec.sliding_window)
                flops += 4 * spec.num_heads * spec.head_dim * keys + _matrices(part, counted)
            counted |= {id(p) for p in part.parameters()}
    return flops + _matrices(model, counted)


def _matrices(module: nn.Module, counted: set[int]) -> float:
    """Two per number of every matrix that was not counted yet."""
    return 2.0 * sum(p.numel() for p in module.parameters() if p.dim() > 1 and id(p) not in counted)
