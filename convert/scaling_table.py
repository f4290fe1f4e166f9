"""Parameters and training FLOPs of four architectures as closed forms, and the operations that they sum.

Source: the table in Scaling Laws for Linear Complexity Language Models (arXiv 2406.16690). It gives totals only; the
operations here are a list that sums to them exactly, under these conventions:

- embedding and head, and vectors such as norms and biases, are left out; the MLP is gated, of width 8d/3;
- a multiply-add is 2 FLOPs, the backward pass twice the forward, so that training is 3 times the forward pass;
- softmax attention counts all n keys of every query, the future ones too;
- linear attention is computed in chunks as long as a head is wide, d/h, whose inner part counts all pairs;
- of elementwise work, only two norms, two residual sums and the MLP's product of gate and value are counted, and what
  an architecture adds to its gates and positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

Number = int | Fraction
"""Exact; pass integers."""


@dataclass(frozen=True)
class Architecture:
    """Closed forms in l layers, width d, h heads, context n, and batch b.

    Attributes:
        parameters: `(l, d, h)` to the number of parameters.
        flops: `(b, n, l, d, h)` to the FLOPs of one training step on b sequences of n tokens.
    """

    name: str
    parameters: Callable[[int, int, int], Fraction]
    flops: Callable[[int, int, int, int, int], Fraction]


def _training(factor: Callable[[int, int, int], Fraction]) -> Callable[[int, int, int, int, int], Fraction]:
    return lambda b, n, l, d, h: 72 * b * n * l * d**2 * factor(n, d, h)


LLAMA = Architecture(
    "llama",
    lambda l, d, h: Fraction(12 * l * d**2),
    _training(lambda n, d, h: 1 + Fraction(n, 6 * d) + Fraction(5, 18 * d)),
)
TNL = Architecture(
    "tnl",
    lambda l, d, h: 12 * l * d**2 + Fraction(2 * l * d**2, h),
    _training(lambda n, d, h: 1 + Fraction(1, 2 * h) + Fraction(5, 18 * d)),
)
HGRN2 = Architecture(
    "hgrn2",
    lambda l, d, h: Fraction(12 * l * d**2 + l * d),
    _training(lambda n, d, h: 1 + Fraction(1, 3 * h) + Fraction(29, 72 * d)),
)
COSFORMER2 = Architecture(
    "cosformer2",
    lambda l, d, h: 12 * l * d**2 + Fraction(2 * l * d**2, h) + Fraction(d**2, h),
    _training(lambda n, d, h: 1 + Fraction(3, 4 * h) + Fraction(23, 72 * d)),
)
ARCHITECTURES = {a.name: a for a in (LLAMA, TNL, HGRN2, COSFORMER2)}


@dataclass(frozen=True)
class Operation:
    """One part of a layer.

    Attributes:
        parameters: its numbers that are learned.
        flops: of one token's forward pass.
        once: whether the model has it once, not in every layer. Such a part counts no FLOPs in the table.
    """

    name: str
    parameters: Number
    flops: Number
    once: bool = False


def operations(name: str, n: int, d: int, h: int) -> list[Operation]:
    """The parts of one layer of an architecture at width d, h heads and context n; see the module's conventions."""
    width = Fraction(d, h)
    return [*_shared(d), *{"llama": _llama, "tnl": _tnl, "hgrn2": _hgrn2, "cosformer2": _cosformer2}[name](n, d, width)]


def _matrix(name: str, rows: Number, columns: Number, copies: int = 1) -> Operation:
    return Operation(name, copies * rows * columns, 2 * copies * rows * columns)


def _elementwise(name: str, numbers: Number) -> Operation:
    return Operation(name, 0, numbers)


def _shared(d: int) -> list[Operation]:
    hidden = Fraction(8 * d, 3)
    return [
        _matrix("q, k, v and output projections", d, d, 4),
        _matrix("gate, up and down projections of the MLP", d, hidden, 3),
        _elementwise("product of gate and up", hidden),
        _elementwise("two norms", 2 * d),
        _elementwise("two residual sums", 2 * d),
    ]


def _chunked(d: int, value: Fraction, key: Number) -> list[Operation]:
    """Linear attention of d / value heads with keys `key` and values `value` wide, in chunks of `value` tokens."""
    heads, chunk = d / value, value
    return [
        _elementwise("logits inside a chunk", 2 * heads * chunk * key),
        _elementwise("values inside a chunk", 2 * heads * chunk * value),
        _elementwise("reading the state", 2 * heads * key * value),
        _elementwise("adding to the state", 2 * heads * key * value),
    ]


def _output_gate(d: int, width: Fraction) -> list[Operation]:
    return [_matrix("output gate, down", d, width), _matrix("output gate, up", width, d)]


def _llama(n: int, d: int, width: Fraction) -> list[Operation]:
    return [_elementwise("logits of all keys", 2 * n * d), _elementwise("values of all keys", 2 * n * d)]


def _tnl(n: int, d: int, width: Fraction) -> list[Operation]:
    return [*_output_gate(d, width), *_chunked(d, width, width)]


def _hgrn2(n: int, d: int, width: Fraction) -> list[Operation]:
    gate = [_elementwise(f"forget gate: {step}", d) for step in ("scaled", "raised to its lower bound", "1 - gate")]
    return [*_chunked(d, width, width), Operation("lower bounds", d, 0), *gate]


def _cosformer2(n: int, d: int, width: Fraction) -> list[Operation]:
    """LRPE doubles the width of q and k and turns half the channels of each."""
    return [
        *_output_gate(d, width),
        *_chunked(d, width, 2 * width),
        _elementwise("turning half of q's and of k's channels", d),
        Operation("position term after the embedding", d * width, 0, once=True),
    ]
