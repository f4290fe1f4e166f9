"""How values are written in cards and reports."""

from __future__ import annotations

import math
import re
from typing import Any

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: Any) -> str:
    """1234567 -> "1,234,567", 13.98123 -> "13.98", 0.00012345 -> "0.0001235", None -> "—"."""
    if value is None:
        return "—"
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return "not finite"
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(share: float | None) -> str:
    """0.8532 -> "85.3 %"."""
    if share is None:
        return "—"
    return f"{share:.1%}".replace("%", " %") if math.isfinite(share) else "not finite"


def size(n_bytes: int | None) -> str:
    """1536 -> "1.5 KiB"."""
    if n_bytes is None:
        return "—"
    power = min(max(int(n_bytes).bit_length() - 1, 0) // 10, len(_SIZES) - 1)
    return f"{n_bytes / 1024**power:.4g} {_SIZES[power]}"


def cell(text: Any) -> str:
    """Text that cannot break out of a table's cell."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def bracketed(text: str) -> str:
    """Text that cannot break out of the brackets of a Markdown image."""
    return re.sub(r"([\[\]\\])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")


def fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
