"""The corpus: passages lose nothing, held-out modules stay held out, and the order is reproducible."""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linearize.recipes.python_corpus import HELD_OUT_MODULES, PASSAGE_CHARS, documents, passages

LINES = st.sampled_from(
    [
        "", "    ", "import os", "class Box:", "    def open(self):", "        return self.lid", "    @property",
        "def main():", "async def serve():", "    async def wait(self):", "@cache", 'if __name__ == "__main__":',
        "naïve = '😀'", "x = 1\r", "\tindented = 2",
    ]
)  # fmt: skip


def function(name: str, lines: int = 4) -> str:
    body = "".join(f"    value_{i} = {name}({i})\n" for i in range(lines))
    return f"def {name}():\n{body}    return value_0\n\n\n"


@given(st.lists(LINES, max_size=60).map("\n".join) | st.text(max_size=200), st.integers(1, 200))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_joined_passages_are_the_text(text, max_chars):
    cut = passages(text, max_chars)
    assert "".join(cut) == text
    assert all(cut), "none is empty"


def test_passages_are_whole_statements_as_long_as_fit():
    functions = [function(f"f{i}") for i in range(9)]
    length = max(map(len, functions))
    assert passages("".join(functions), 3 * length) == ["".join(functions[i : i + 3]) for i in (0, 3, 6)]
    assert passages("".join(functions), length) == functions


def test_what_is_longer_than_a_passage_is_cut_at_methods_then_at_empty_lines_then_not_at_all():
    first, second = (textwrap.indent(function(f"m{i}").rstrip() + "\n", "    ") for i in (1, 2))
    assert passages(f"class Box:\n{first}{second}", len(second)) == ["class Box:\n", first, second]
    parts = [f"def long():\n{'    a = 1' * 9}\n\n", f"    {'b = 2;' * 9}\n\n", f"    {'c = 3;' * 9}\n"]
    assert passages("".join(parts), max(map(len, parts))) == parts
    statement = f"table = [\n{'    1,' * 500}\n]\n"
    assert passages(statement, 100) == [statement]


def make_library(root: Path, backwards: bool = False) -> Path:
    """A standard library in which every text names the module it stands in."""
    plain = [f"module_{i}.py" for i in range(6)] + ["json/encoder.py", "test/test_json.py"]
    held = [f"{name}.py" for name in HELD_OUT_MODULES]
    tests = [f"test/{name}" for m in HELD_OUT_MODULES for name in (f"test_{m}.py", f"{m}_tests.py")]
    others = ["site-packages/theirs.py", "__pycache__/left.py", "encodings/table.py", "config-3.11-x/made.py"]
    files = [*plain, *held, *tests, *others]
    for name in reversed(files) if backwards else files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        marker = "MARK_" + name.replace("/", "_").replace("-", "_").removesuffix(".py")
        path.write_text("".join(function(f"{marker}_{i}") for i in range(8)))
    (root / "short.py").write_text("MARK_short = 1\n")
    (root / "generated.py").write_text("MARK_generated = 1\n" * 40_000)
    (root / "escapes.py").write_text("MARK_escapes = '" + "\\x00" * 200 + "'\n")
    (root / "pydoc_data").mkdir()
    (root / "pydoc_data" / "topics.py").write_text("topics = {'if': 'The statement\\n' 'chooses.\\n'}\n")
    return root


def test_held_out_modules_and_their_tests_are_never_trained_on(tmp_path):
    root = make_library(tmp_path)
    train, held = ("".join(documents(split, root)) for split in ("train", "heldout"))
    for name in HELD_OUT_MODULES:
        assert f"MARK_{name}_0()" in held and f"MARK_{name}_" not in train
        for test in (f"MARK_test_test_{name}_", f"MARK_test_{name}_tests_"):
            assert test not in train and test not in held
    for name in ("module_0", "module_5", "json_encoder", "test_test_json"):
        assert all(f"MARK_{name}_{i}()" in train for i in range(8)) and f"MARK_{name}_" not in held
    for name in ("site_packages", "__pycache__", "encodings", "config_3", "short", "generated", "escapes"):
        assert f"MARK_{name}" not in train + held
    assert "The statement\nchooses.\n" in train


def test_the_order_depends_on_the_seed_only(tmp_path):
    first, second = make_library(tmp_path / "a"), make_library(tmp_path / "b", backwards=True)
    train = documents("train", first)
    assert train == documents("train", first, seed=0) == documents("train", second)
    other = documents("train", first, seed=1)
    assert other != train and Counter(other) == Counter(train)
    unshuffled = sorted(train, key=lambda text: text.split("MARK_")[-1])
    assert train != unshuffled and train != unshuffled[::-1]


def test_the_held_out_order_is_fixed(tmp_path):
    first, second = make_library(tmp_path / "a"), make_library(tmp_path / "b", backwards=True)
    held = documents("heldout", first)
    assert held == documents("heldout", first, seed=1) == documents("heldout", second, seed=2)
    modules = [text.split("MARK_")[1].split("_")[0] for text in held[: len(HELD_OUT_MODULES)]]
    assert len(set(modules)) > 5, "the first passages come from many modules"


def test_this_interpreters_library_is_split_cleanly():
    train, held = documents("train"), documents("heldout")
    assert len(train) > 10_000 and 300 < len(held) < 5_000
    joined = [text for text in (*train, *held) if len(text) <= PASSAGE_CHARS]
    assert len(joined) > 0.8 * len(train + held), "few statements are longer than a passage"
    assert not {text for text in held if len(text) > 200} & set(train)


def test_errors_name_the_cause(tmp_path):
    with pytest.raises(ValueError, match="'validation'; use 'train' or 'heldout'"):
        documents("validation", tmp_path)
    for split in ("train", "heldout"):
        with pytest.raises(FileNotFoundError, match="--data FILE"):
            documents(split, tmp_path)
