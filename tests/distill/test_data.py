"""Reading, splitting, packing, and the order of the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linearize.convert.errors import ConversionError
from linearize.distill.data import TokenBlocks
from linearize.distill.reading import read_corpus, split_heldout


@given(st.lists(st.text(max_size=20), max_size=8))
def test_the_split_keeps_every_character_in_order(documents: list[str]) -> None:
    train, heldout = split_heldout(documents, 0.1)
    total = sum(map(len, documents))
    assert "".join(train) + "".join(heldout) == "".join(documents)
    assert sum(map(len, train)) == min(total, int(total * 0.9))


def test_every_kind_of_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo" * 10)
    assert read_corpus(tmp_path / "a.txt").train[0] == "one"
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": f"line {i}"}) for i in range(20)))
    corpus = read_corpus(tmp_path / "b.jsonl")
    assert corpus.train[0] == "line 0" and corpus.heldout[-1] == "line 19"
    assert "one" in read_corpus(tmp_path).train[0]
    import datasets

    datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(20)]}).save_to_disk(tmp_path / "saved")
    assert read_corpus(tmp_path / "saved").train[0] == "row 0"


def test_bad_sources_name_the_problem(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"txt": 1}\n')
    with pytest.raises(ConversionError, match="line 2"):
        read_corpus(tmp_path / "bad.jsonl")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConversionError, match="UTF-8"):
        read_corpus(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text("  \n")
    with pytest.raises(ConversionError, match="no text"):
        read_corpus(tmp_path / "empty.txt")


@given(blocks=st.integers(1, 9), size=st.integers(1, 5), seed=st.integers(0, 3))
def test_every_epoch_visits_every_block_once_whatever_the_batch(blocks: int, size: int, seed: int) -> None:
    data = TokenBlocks(torch.arange(blocks * 4), 4)
    steps = 3 * blocks
    visited = torch.cat([data.batch(step, size, seed)[:, 0] // 4 for step in range(steps)]).tolist()
    for epoch in range(len(visited) // blocks):
        assert sorted(visited[epoch * blocks : (epoch + 1) * blocks]) == list(range(blocks))
    again = TokenBlocks(torch.arange(blocks * 4), 4)  # any step can be asked for first
    assert torch.equal(again.batch(steps - 1, size, seed), data.batch(steps - 1, size, seed))


def test_a_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ConversionError, match="3 tokens, one sequence has 4"):
        TokenBlocks(torch.arange(3), 4)


@given(blocks=st.integers(1, 12), tokens=st.integers(1, 60))
def test_a_spread_sample_is_even_and_no_larger_than_asked(blocks: int, tokens: int) -> None:
    chosen = TokenBlocks(torch.arange(blocks * 4), 4).spread(tokens).blocks[:, 0] // 4
    assert len(chosen) == max(1, min(blocks, tokens // 4)) and chosen[0] == 0
    gaps = chosen.diff().tolist()
    assert not gaps or max(gaps) - min(gaps) <= 1
