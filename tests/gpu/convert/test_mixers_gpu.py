"""Every contract of a mixer on a real GPU, in float32 and bfloat16: the kernels as mixers call them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from linearize.convert import build_student
from linearize.convert.cache import MixerCacheLayer
from linearize.convert.mixers import MIXERS
from linearize.convert.verify import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
LENGTH, PAD, SECOND = 70, 9, 33
"""Tokens: more than a chunk of any kernel; padding before them; those of a second, packed text."""

PURE = {name for name in ("gla", "kda", "mamba2", "rodimus") if name in MIXERS}
CASES = [
    *(pytest.param(name, {"window": 16} if "window" in MIXERS[name].Options.model_fields else {}, id=name)
      for name in sorted(MIXERS)),
    *(pytest.param(name, {"window": 0}, id=f"{name}-pure") for name in sorted(PURE)),
]  # fmt: skip
RECURRENT = [case for case in CASES if MIXERS[case.values[0]].recurrent]  # type: ignore[index]
dtypes = pytest.mark.parametrize("dtype", list(LIMIT), ids=["float32", "bfloat16"])


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, 64, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def student_of(name: str, options: dict[str, Any], device: str = DEVICE, dtype: torch.dtype = torch.float32) -> Any:
    """A calibrated student of a random Llama, its new tensors shaken so that no start at zero hides anything."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32768, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    teacher = AutoModelForCausalLM.from_config(config).to(device, dtype).eval()
    with torch.no_grad():
        for parameter_name, parameter in teacher.named_parameters():
            if "proj" in parameter_name:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    student: Any = build_student(teacher, name, calibration=tokens(2, 96).to(device), **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for mixer in student.mixers:
            for parameter in mixer.new_parameters().values():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return student


@torch.no_grad()
def logits(student: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return student(input_ids=ids, use_cache=False, **kwargs).logits


@torch.no_grad()
def in_pieces(student: Any, ids: torch.Tensor, sizes: list[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    cache, start, pieces = student.new_cache(), 0, []
    for piece in ids.split(sizes, 1):
        end = start + piece.shape[1]
        kwargs = {}
        if mask is not None:
            positions = (mask.cumsum(1) - 1).clamp_min(0)
            kwargs = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        pieces.append(student(input_ids=piece, past_key_values=cache, use_cache=True, **kwargs).logits)
        start = end
    return torch.cat(pieces, 1)


@pytest.mark.parametrize(("name", "options"), CASES)
@dtypes
def test_every_way_to_read_a_text_gives_the_same(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Token by token, in pieces, padded on the left, and packed with another text: all as in one."""
    student, ids, limit = student_of(name, options, dtype=dtype), tokens(2, LENGTH), LIMIT[dtype]
    whole = logits(student, ids)
    assert whole.dtype == dtype and whole.isfinite().all()
    assert relative_error(in_pieces(student, ids, [1] * LENGTH), whole) < limit
    assert relative_error(in_pieces(student, ids, [11, 1, 40, *[1] * (LENGTH - 52)]), whole) < limit

    padded = torch.cat([ids.new_zeros(2, PAD), ids], 1)
    mask = (padded != 0).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    both = logits(student, padded, attention_mask=mask, position_ids=positions)[:, PAD:]
    assert relative_error(both, whole) < limit
    both = in_pieces(student, padded, [5, 20, *[1] * (LENGTH + PAD - 25)], mask)[:, PAD:]
    assert relative_error(both, whole) < limit

    if MIXERS[name].recurrent:
        packed = torch.cat([ids[:1], ids[1:, :SECOND]], 1)
        positions = torch.cat([torch.arange(LENGTH), torch.arange(SECOND)])[None].to(DEVICE)
        bounds = torch.tensor([0, LENGTH, LENGTH + SECOND], device=DEVICE)
        together = logits(student, packed, position_ids=positions, cu_seq_lens_q=bounds)
        assert relative_error(together, torch.cat([whole[:1], whole[1:, :SECOND]], 1)) < limit


def _gradients(student: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    student.train().zero_grad()
    student(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {
        f"{i}.{name}": parameter.grad.clone()
        for i, mixer in enumerate(student.mixers)
        for name, parameter in mixer.new_parameters().items()
    }


@pytest.mark.parametrize(("name", "options"), CASES)
def test_gpu_equals_cpu_and_gradients_reach_every_new_tensor(name: str, options: dict[str, Any]) -> None:
    """One model on both: Triton against the chunked form. Then in bfloat16, whose gradients point the same way."""
    ids, student = tokens(2, LENGTH), student_of(name, options, device="cpu")
    same = copy.deepcopy(student).to(DEVICE)
    assert relative_error(logits(same, ids), logits(student, ids.cpu())) < LIMIT[torch.float32]
    expected, found = _gradients(student, ids.cpu()), _gradients(same, ids)
    half = same.bfloat16()
    for mixer in half.mixers:
        for module in mixer.float32_modules:
            mixer.get_submodule(module).float()
    rounded = _gradients(half, ids)
    for parameter, wanted in expected.items():
        assert wanted.abs().sum() > 0, parameter
        assert relative_error(found[parameter], wanted) < 2e-3, parameter
        assert rounded[parameter].isfinite().all() and rounded[parameter].abs().sum() > 0, parameter
    if expected:
        together, wanted = (torch.cat([g.flatten().float().cpu() for g in x.values()]) for x in (rounded, expected))
        assert torch.nn.functional.cosine_similarity(together, wanted, dim=0) > 0.95


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), RECURRENT)
def test_32768_tokens_in_bfloat16_stay_finite(name: str, options: dict[str, Any]) -> None:
    student = student_of(name, options, dtype=torch.bfloat16)
    x = torch.randn(1, 32768, 128, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    rope = student.get_decoder().rotary_emb(x, torch.arange(32768, device=DEVICE)[None])
    heads, state = student.mixers[0].mix(x, rope, None, None)
    assert heads.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in state.values())


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), [case for case in RECURRENT if case.id not in ("rat", "head-hybrid")])
def test_decoding_never_waits_for_the_gpu(name: str, options: dict[str, Any]) -> None:
    """One token after a prompt: no step reads a tensor back."""
    student = student_of(name, options, dtype=torch.bfloat16)
    mixer, ids = student.mixers[0], tokens(2, LENGTH)
    x = student.get_decoder().embed_tokens(ids)
    rope = student.get_decoder().rotary_emb(x, torch.arange(LENGTH, device=DEVICE)[None])
    layer = MixerCacheLayer()
    layer.advance(mixer.mix(x, rope, None, None)[1], LENGTH)
    state = layer.state
    token, turn = x[:, -1:], tuple(t[:, -1:] for t in rope)
    mixer.mix(token, turn, None, state)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        heads, _ = mixer.mix(token, turn, None, state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert heads.isfinite().all()
