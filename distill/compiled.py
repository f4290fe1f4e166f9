"""What trains, through torch.compile: it fuses the elementwise work between the kernels and matrix products.

The kernels themselves are custom operators, which it calls and does not look into. Whole blocks are not compiled: stages
watch the attention inside them with hooks of their own for every step, which a compiled block would not see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.attention_spec import find_layers
from linearize.convert.surgery import student_mixers


@contextmanager
def compiled(student: PreTrainedModel | None, wanted: bool = True) -> Iterator[None]:
    """Context: every mixer's `mix` and every MLP's `forward` run through torch.compile.

    Each is one graph, which layers of the same kind share.
    """
    if student is None or not wanted:
        yield
        return
    mlps = [getattr(block, "mlp", None) for block in find_layers(student, student.config)[0]]
    parts: list[tuple[nn.Module, str]] = [(mixer, "mix") for mixer in student_mixers(student)]
    parts += [(mlp, "forward") for mlp in mlps if isinstance(mlp, nn.Module)]
    for module, method in parts:
        module.__dict__[method] = torch.compile(getattr(module, method))
    try:
        yield
    finally:
        for module, method in parts:
            del module.__dict__[method]
