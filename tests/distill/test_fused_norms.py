"""Fused norms: the same model, forward and backward; norms of another kind are left alone."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from linearize.distill.fused_norms import agrees, fused_norms
from tests.families import random_teacher


@pytest.mark.parametrize(("family", "norms"), [("llama", 9), ("qwen3", 17), ("gemma2", 0)])
def test_a_model_with_fused_norms_is_the_same_model(family: str, norms: int) -> None:
    model = random_teacher(family).requires_grad_(True)
    ids = torch.arange(1, 33).view(2, 16)

    def logits_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=ids, use_cache=False).logits
        return logits, torch.autograd.grad(logits.square().mean(), model.get_input_embeddings().weight)[0]

    expected = logits_and_gradient()
    with fused_norms(model, on="cpu") as count:
        assert count == norms
        torch.testing.assert_close(logits_and_gradient(), expected, rtol=1e-5, atol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())
    torch.testing.assert_close(logits_and_gradient(), expected, rtol=0, atol=0)


def test_nothing_changes_on_a_cpu() -> None:
    with fused_norms(random_teacher("llama")) as count:
        assert count == 0


def test_a_norm_whose_gain_is_one_plus_its_weight_does_not_agree() -> None:
    norm = Gemma2RMSNorm(16)
    assert not agrees(norm)
    torch.nn.init.ones_(norm.weight)
    assert not agrees(norm)
