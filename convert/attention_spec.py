"""Finding and describing the attention of any decoder by its structure, without a file per family."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

from linearize.convert.errors import ConversionError

ATTENTION_NAMES = ("self_attn", "attention", "self_attention", "attn")
SEPARATE = ("q_proj", "k_proj", "v_proj")
FUSED = "qkv_proj"
OUTPUT_NAMES = ("o_proj", "out_proj", "dense")

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class AttentionSpec:
    """What a mixer must know of the attention it replaces.

    Head `h` of the query reads kv head `h // (num_heads // num_kv_heads)`.

    Attributes:
        layout: "separate" q/k/v projections or one "fused" projection whose rows are q, then k, then v.
        qk_norm: None, "head" (a norm over each head's channels) or "full" (over all heads' channels at once).
        scaling: factor on q·k before the softmax.
        softcap: logits become `softcap * tanh(logits / softcap)`; None without.
        sliding_window: how many keys a query of the teacher sees, its own included; None for all.
        rotary: the family's own function `(q, k, cos, sin, unsqueeze_dim) -> (q, k)`; None without RoPE.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layout: Literal["separate", "fused"]
    output_name: str
    qk_norm: Literal["head", "full"] | None
    scaling: float
    softcap: float | None
    sliding_window: int | None
    rotary: Rotary | None

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def projection_names(self) -> tuple[str, ...]:
        """Submodules that hold the teacher's projections, in the order they are applied."""
        inputs = SEPARATE if self.layout == "separate" else (FUSED,)
        return (*inputs, self.output_name)


def kv_bytes(spec: AttentionSpec, context: int, itemsize: int) -> int:
    """Keys and values that one softmax layer keeps of `context` tokens."""
    kept = context if spec.sliding_window is None else min(context, spec.sliding_window)
    return 2 * kept * spec.num_kv_heads * spec.head_dim * itemsize


def mean_keys(context: int, window: int | None) -> float:
    """Keys that a query sees, its own included: the mean over a sequence of `context` tokens; None for no window."""
    window = context if window is None else min(context, window)
    return window * (2 * context - window + 1) / (2 * context)


def find_layers(model: nn.Module, config: PreTrainedConfig) -> tuple[nn.ModuleList, str]:
    """The list of decoder blocks and the name of the attention inside each.

    Raises:
        ConversionError: no list of `num_hidden_layers` blocks with an attention in them.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            for attention_name in ATTENTION_NAMES:
                if all(hasattr(block, attention_name) for block in module):
                    return module, attention_name
            blocks = name or "the model"
            raise ConversionError(
                f"{type(model).__name__}: the blocks in {blocks} have no attention named "
                f"{', '.join(ATTENTION_NAMES)}; only decoders with one softmax attention per block convert"
            )
    raise ConversionError(
        f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder blocks; "
        "only decoder language models convert"
    )


def describe_attention(attention: nn.Module, config: PreTrainedConfig) -> AttentionSpec:
    """Read an `AttentionSpec` off a teacher's attention module. Works on meta tensors.

    Raises:
        ConversionError: the module has a part that no mixer could keep (named in the message).
    """
    kind = type(attention).__name__
    layout: Literal["separate", "fused"]
    if all(hasattr(attention, name) for name in SEPARATE):
        layout = "separate"
    elif hasattr(attention, FUSED):
        layout = "fused"
    else:
        raise ConversionError(f"{kind} has neither q_proj, k_proj, v_proj nor qkv_proj; this family is not supported")
    output_name = next((name for name in OUTPUT_NAMES if hasattr(attention, name)), None)
    if output_name is None:
        raise ConversionError(f"{kind} has no output projection ({', '.join(OUTPUT_NAMES)})")
    if getattr(attention, "sinks", None) is not None:
        raise ConversionError(f"{kind} has learned attention sinks, which no mixer keeps; this family is not supported")

    head_dim = int(getattr(attention, "head_dim", config.hidden_size // config.num_attention_heads))
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return AttentionSpec(
        hidden_size=config.hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layout=layout,
        output_name=output_name,
        qk_norm=_norm_kind(attention, head_dim),
        scaling=float(getattr(attention, "scaling", head_dim**-0.5)),
        softcap=_first_not_none(attention, "attn_logit_softcapping"),
        sliding_window=_sliding_window(attention, config),
        rotary=getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None),
    )


def _first_not_none(module: nn.Module, *names: str) -> Any:
    return next((value for name in names if (value := getattr(module, name, None)) is not None), None)


def _norm_kind(attention: nn.Module, head_dim: int) -> Literal["head", "full"] | None:
    norm = _first_not_none(attention, "q_norm")
    if norm is None:
        return None
    weight = getattr(norm, "weight", None)
    return "full" if weight is not None and weight.shape[-1] != head_dim else "head"


def _sliding_window(attention: Any, config: PreTrainedConfig) -> int | None:
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[attention.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)
