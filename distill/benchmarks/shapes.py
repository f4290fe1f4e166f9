"""Named shapes of random teachers: a speed depends on the shape, not on what the tensors hold."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from linearize.convert.errors import ConversionError

_LLAMA_3: dict[str, Any] = dict(
    vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=4096, tie_word_embeddings=True,
    ),
    "1b": dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, tie_word_embeddings=True, **_LLAMA_3,
    ),
    "3b": dict(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8,
        head_dim=128, tie_word_embeddings=True, **_LLAMA_3,
    ),
    "8b": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, tie_word_embeddings=False, **_LLAMA_3,
    ),
}  # fmt: skip
"""Llama's configuration by name: "1b" and "3b" are Llama 3.2's, "8b" is Llama 3.1's."""


def random_teacher(shape: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A frozen Llama of a named shape with random tensors, made on the device.

    Raises:
        ConversionError: there is no such shape.
    """
    if shape not in SHAPES:
        raise ConversionError(f"there is no shape {shape!r}; choose from {', '.join(SHAPES)}, or give a model folder")
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPES[shape])
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)
