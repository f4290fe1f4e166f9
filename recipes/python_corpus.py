"""The text every Python interpreter ships with: the standard library's source and documentation.

The bundled teacher was trained on it and the main job converts on it, so neither needs a network. A fixed set
of modules is held out, together with their tests, and is used only for measuring.
"""

from __future__ import annotations

import ast
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


def documents(split: str, root: Path | None = None, seed: int = 0) -> list[str]:
    """The texts of one split, one string per file, in an order fixed by `seed`.

    Args:
        split: "train" or "heldout". Held-out texts come in alphabetical order whatever the seed.
        root: a standard library folder; default the running interpreter's.
        seed: order of the training texts.

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
        random.Random(seed).shuffle(texts)
    return texts
