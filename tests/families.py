"""Small random models of every supported family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

BASE: dict[str, Any] = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    "phi3": {"num_key_value_heads": 1},
}


def random_teacher(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random decoder with every tensor random, biases and norms too: zeros and ones would hide mistakes."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES[family], **changes})
    eager = getattr(config, "attn_logit_softcapping", None) is not None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if eager else "sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "proj" in name:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return model.eval()


def tiny_tokenizer(folder: Path) -> None:
    """Save a small byte-level tokenizer into a model folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=64, special_tokens=["<pad>", "<s>"], show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat and looked at the hat"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", pad_token="<pad>")
    fast.save_pretrained(folder)
