"""The text every Python interpreter ships with: the standard library's source and documentation.

The bundled teacher was trained on it and the main job converts on it, so neither needs a network. A fixed set
of modules is held out, together with their tests, and is used only for measuring.
"""

from __future__ import annotations

import ast
import keyword
import random
import re
import sysconfig
from pathlib import Path

HELD_OUT_MODULES = (
    "argparse", "bisect", "calendar", "cmd", "configparser", "csv", "difflib", "fractions", "graphlib",
    "heapq", "pprint", "queue", "sched", "shelve", "statistics", "textwrap",
)  # fmt: skip
"""Modules that exist as single files in every supported Python version and are never trained on."""

SKIPPED_FOLDERS = {"site-packages", "__pycache__", "encodings", "lib2to3", "ensurepip", "config"}
"""Folders whose files are never read: other people's packages, generated tables and bundled wheels."""

MAX_FILE_BYTES = 400_000
"""Files this large or larger are generated."""

_GENERATED = re.compile(r"(\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|0x[0-9a-fA-F]{2,}|\\[0-7]{3})")


_IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]{2,}\b")

PASSAGE_CHARS = 600
"""Longest passage that is put together from smaller ones, in characters."""

_BOUNDARIES = (
    re.compile(r"(?m)^(?=(?:@|def |class |async def |if __name__))"),
    re.compile(r"(?m)^(?=    (?:@|def |async def ))"),
    re.compile(r"(?<=\n\n)(?=\S)|(?<=\n\n)(?= )"),
)


def standard_library() -> Path:
    """The running interpreter's standard library folder."""
    return Path(sysconfig.get_paths()["stdlib"])


def _is_held_out(path: Path) -> bool:
    return path.stem.removeprefix("test_").removesuffix("_tests") in HELD_OUT_MODULES


def _is_prose(text: str) -> bool:
    """Tables of escapes and numbers teach nothing about Python."""
    return len(_GENERATED.findall(text)) * 100 < len(text)


def _topics(source: str) -> list[str]:
    """The language reference that `help()` prints, read from its module's source without running it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == "topics" for t in node.targets):
            return [str(text) for text in ast.literal_eval(node.value).values()]
    return []


def passages(text: str, max_chars: int = PASSAGE_CHARS) -> list[str]:
    """Cut a text into passages of whole top-level statements, methods or paragraphs; joined they give it back.

    Neighbours are put together as long as they fit in `max_chars`; a longer statement is cut where a method begins,
    then at empty lines, and only then kept whole.
    """
    pieces = [text]
    for boundary in _BOUNDARIES:
        pieces = [part for piece in pieces for part in (boundary.split(piece) if len(piece) > max_chars else [piece])]
    joined: list[str] = []
    for piece in filter(None, pieces):
        if joined and len(joined[-1]) + len(piece) <= max_chars:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def renamed(texts: list[str], seed: int = 0, share: float = 0.5) -> list[str]:
    """The texts with a share of their identifiers renamed, consistently within each text.

    A teacher that has read a text many times continues it from memory; with other names in it, it has to look back at
    what stands there, as it does in a text it has never seen. New names are drawn from all the texts, as often as they
    occur. Keywords and names of fewer than three letters stay.
    """
    rng = random.Random(seed)
    names = [name for text in texts for name in sorted(set(_IDENTIFIER.findall(text))) if not keyword.iskeyword(name)]

    def rename(text: str) -> str:
        own = sorted({name for name in _IDENTIFIER.findall(text) if not keyword.iskeyword(name)})
        new = {name: rng.choice(names) for name in own if rng.random() < share}
        return _IDENTIFIER.sub(lambda match: new.get(match[0], match[0]), text)

    return [rename(text) for text in texts]


def documents(split: str, root: Path | None = None, seed: int = 0, max_chars: int = PASSAGE_CHARS) -> list[str]:
    """The passages of one split, shuffled: one function, class, method or paragraph each.

    Args:
        split: "train" or "heldout". The order of the held-out passages is fixed.
        root: a standard library folder; default the running interpreter's.
        seed: order of the training passages.
        max_chars: see `passages`.

    Raises:
        FileNotFoundError: the interpreter ships without the sources (some embedded builds do).
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split is {split!r}; use 'train' or 'heldout'")
    root = root or standard_library()
    if split == "heldout":
        paths = [p for name in HELD_OUT_MODULES if (p := root / f"{name}.py").is_file()]
    else:
        paths = [
            p
            for p in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix())
            if not SKIPPED_FOLDERS & set(p.relative_to(root).parts)
            and not p.relative_to(root).parts[0].startswith("config-")
            and not _is_held_out(p)
            and 200 < p.stat().st_size < MAX_FILE_BYTES
        ]
    if not paths:
        raise FileNotFoundError(f"no Python sources under {root}: give a text of your own with --data FILE")
    texts = [p.read_text(encoding="utf-8", errors="ignore") for p in paths]
    if split == "train":
        topics = root / "pydoc_data" / "topics.py"
        texts = [t for t in texts if _is_prose(t)]
        if topics.is_file():
            texts += _topics(topics.read_text(encoding="utf-8"))
    cut = [passage for text in texts for passage in passages(text, max_chars) if passage.strip()]
    random.Random(seed if split == "train" else 0).shuffle(cut)
    return cut
