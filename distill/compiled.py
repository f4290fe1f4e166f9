"""What a training step runs, through torch.compile: it fuses the elementwise work between kernels and matrix products.

The kernels themselves are custom operators, which it calls and does not look into. Whole blocks are not compiled: stages
watch the attention inside them with hooks of their own for every step, which a compiled block would not see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.attention_spec import find_layers
from linearize.convert.mixers import Mixer
from linearize.convert.surgery import student_mixers
from linearize.distill.override import override

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_functions: dict[Any, Any] | None = None
"""Inside `compiled`: what became of `compilable` functions."""


@contextmanager
def compiled(student: PreTrainedModel | None, wanted: bool = True) -> Iterator[None]:
    """Context: mixers (`mix_and_project`), the teacher's attention, kept attention and MLPs run through torch.compile,
    and so do `compilable` functions.

    Each is one graph, which layers of the same kind share. What was compiled is forgotten in the end: the next stage may
    have batches of another size, and would get graphs for any size, which are slower.
    """
    global _functions
    if student is None or not wanted:
        yield
        return
    before, _functions = _functions, {}
    try:
        with ExitStack() as stack:
            for module, method in _parts(student):
                stack.enter_context(override(module, method, torch.compile(getattr(module, method))))
            yield
    finally:
        _functions = before
        torch.compiler.reset()


def _parts(student: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
    blocks, name = find_layers(student, student.config)
    for mixer in student_mixers(student):
        yield mixer, "mix_and_project"
    for block in blocks:
        attention: Any = getattr(block, name)
        yield attention.attention if isinstance(attention, Mixer) else attention, "forward"
    for block in blocks:
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, nn.Module):
            yield mlp, "forward"


def compilable(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator: the function runs through torch.compile inside `compiled`."""

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if _functions is None:
            return function(*args, **kwargs)
        if function not in _functions:
            _functions[function] = torch.compile(function)
        return _functions[function](*args, **kwargs)  # type: ignore[no-any-return]

    return run


def as_written() -> AbstractContextManager[Any]:
    """Context: nothing runs compiled, so that hooks inside compiled parts are called."""
    return torch.compiler.set_stance("force_eager") if _functions is not None else nullcontext()
