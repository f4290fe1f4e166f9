"""Checks that the short convolution and its step share."""

from __future__ import annotations


def check_activation(operation: str, activation: object) -> None:
    """Check the activation's name."""
    if activation not in (None, "silu"):
        raise ValueError(f'{operation}: activation is {activation!r}; use None or "silu"')
