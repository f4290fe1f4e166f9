"""Bytes a sequence holds while it is generated: the student's state against the teacher's KV cache."""

from __future__ import annotations

from transformers import PreTrainedModel

from linearize.convert.attention_spec import describe_attention, find_layers, kv_bytes
from linearize.convert.mixers import Mixer


def cache_bytes(student: PreTrainedModel, context: int) -> tuple[int, int]:
    """Bytes of one sequence of `context` tokens: the student's state, and its teacher's KV cache."""
    layers, name = find_layers(student, student.config)
    state = kv = 0
    for block in layers:
        module = getattr(block, name)
        is_mixer = isinstance(module, Mixer)
        spec = module.spec if is_mixer else describe_attention(module, student.config)
        teacher = kv_bytes(spec, context, student.dtype.itemsize)
        kv += teacher
        state += module.state_bytes(context, student.dtype) if is_mixer else teacher
    return state, kv
