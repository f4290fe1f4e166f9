"""The bundled teacher, and what a teacher's name on the command line means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from linearize.convert.checkpoint import resolve_source

BUNDLED = {"llama": Path(__file__).parent / "assets" / "llama"}
"""Names that need no network. Any other name is a path or a Hub id."""


@dataclass(frozen=True)
class Teacher:
    """A resolved teacher.

    Attributes:
        label: how messages name it.
        name: what the student's card gives as its base: the Hub id, or the folder's name.
    """

    label: str
    name: str
    folder: Path
    bundled: bool


def resolve_teacher(name: str, revision: str | None = None) -> Teacher:
    """Find a teacher's folder; downloads it when `name` is a Hub id.

    Raises:
        ConversionError: it is none of a bundled name, a model folder, a reachable Hub id.
    """
    if name in BUNDLED:
        return Teacher(
            f"{name} (bundled: a small Llama trained on Python's standard library)", name, BUNDLED[name], True
        )
    folder = resolve_source(name, revision)
    is_path = Path(name).expanduser().is_dir()
    return Teacher(str(name), folder.resolve().name if is_path else str(name), folder, False)
