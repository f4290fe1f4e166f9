"""The one exception a user is meant to read."""

from __future__ import annotations


class ConversionError(ValueError):
    """Bad input. The message is one line: the cause, the value and the fix. Commands exit with code 2."""
