"""Documents apart, mixtures, streams and the token cache."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linearize.convert import build_student
from linearize.convert.errors import ConversionError
from linearize.convert.surgery import new_parameters
from linearize.distill import layout, losses, token_cache
from linearize.distill.data import Tokens, cached_tokens, mixture, read_tokens
from linearize.distill.layout import IGNORED, apart
from linearize.distill.reading import Stream, read_corpus, shares_of
from linearize.distill.stages import Hidden, Logits, Lora, Matrix, Stage, Transfer, Workbench, hidden, transfer
from linearize.distill.trainer import LoopConfig, train
from tests.families import random_teacher


class Letters:
    """A tokenizer of characters; counts its calls."""

    bos_token_id, eos_token_id, calls = 1, None, 0

    def __call__(self, text: str, verbose: bool = True) -> Any:
        self.calls += 1
        return SimpleNamespace(input_ids=[ord(c) % 60 + 2 for c in text])

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(62)}


def _tokens(lengths: list[int]) -> Tokens:
    ids = torch.randint(2, 64, (sum(lengths),), generator=torch.Generator().manual_seed(1)).int()
    return Tokens(ids, torch.tensor([0, *lengths]).cumsum(0)[:-1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(2, 6))
def test_packed_rows_hold_the_stream_and_padded_rows_every_document(lengths: list[int], length: int) -> None:
    tokens = _tokens(lengths)
    count = sum(lengths) // length
    if count:
        rows = tokens.blocks(length, "packed").blocks
        assert torch.equal(rows[:, 0], tokens.ids[: count * length].view(count, length))
        starts = {*tokens.starts.tolist(), *range(0, count * length, length)}
        assert (rows[:, 1].flatten() == IGNORED).nonzero()[:, 0].tolist() == sorted(
            s for s in starts if s < count * length
        )
    pieces = [p for d in tokens.ids.split(lengths) for p in d.split(length) if len(p) > 1]
    if pieces:
        rows = tokens.blocks(length, "padded").blocks
        for row, piece in zip(rows, pieces, strict=True):
            assert torch.equal(row[0, : len(piece)], piece) and torch.equal(row[1, 1 : len(piece)], piece[1:])
            assert bool((row[1, len(piece) :] == IGNORED).all()) and row[1, 0] == IGNORED


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8).filter(lambda lengths: max(lengths) > 1))
def test_the_layout_restarts_positions_and_leaves_out_padding(lengths: list[int]) -> None:
    tokens = _tokens(lengths)
    with apart(tokens.blocks(10, "padded").blocks) as batch:
        found = layout._current
        assert found is not None and batch.shape[1] == 2
        assert found.cu_seqlens[-1] == batch.shape[-1] == found.position_ids.numel()
        for a, b in zip(found.cu_seqlens[:-1].tolist(), found.cu_seqlens[1:].tolist(), strict=True):
            assert found.position_ids[0, a:b].tolist() == list(range(b - a))
            assert bool((found.real[a:b] == (b - a > 1)).all())
        assert int(found.real.sum()) == sum(n for n in lengths if n > 1)
    assert layout.arguments() == {}


STAGES = [
    Transfer(learning_rates={"new": 1e-2}),
    Transfer(learning_rates={"new": 1e-2}, loss="mse"),
    Lora(rank=4, ce_weight=0.5),
    Hidden(),
]


@pytest.mark.parametrize("documents", ["packed", "padded"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: f"{stage.kind}-{getattr(stage, 'loss', '')}")
def test_documents_in_one_batch_are_learned_as_if_each_stood_alone(
    stage: Stage, documents: Any, tmp_path: Path
) -> None:
    lengths = [13, 19, 32, 8, 24]
    tokens = _tokens(lengths)
    data = tokens.blocks(32, documents)
    teacher = random_teacher("qwen2")
    student = build_student(teacher, "rodimus", window=8)
    (part,) = stage.prepare(Workbench(student, teacher, frozenset(new_parameters(student)), data, 1, 1, 0, tmp_path))
    objective = part.objective.eval()
    with apart(data.blocks.long()) as batch:
        together = objective(batch)
    together.backward()
    names = [n for group in part.groups for n in group["params"]]
    gradients = {n: p.grad.clone() for n, p in student.named_parameters() if n in names and p.grad is not None}
    student.zero_grad()
    assert len(gradients) > 10

    pieces = tokens.ids.long().split(lengths)
    if isinstance(stage, Lora):
        weights = [len(p) - 1 for p in pieces]
        losses = [objective(p[None]) for p in pieces]
        separate = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    elif getattr(stage, "loss", "") == "mse":
        separate = sum(len(p) * objective(p[None]) for p in pieces) / sum(map(len, pieces))
    else:
        separate = _over_common_squares(objective, pieces)
    assert float(together) == pytest.approx(float(separate), rel=1e-4)
    separate.backward()
    for name, gradient in gradients.items():
        wanted = dict(student.named_parameters())[name].grad
        scale = float(wanted.abs().max())
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4 * scale + 1e-8, msg=name)


def _over_common_squares(objective: Any, pieces: Any) -> torch.Tensor:
    """The normalized error of all pieces: squares summed before they are divided, layer by layer."""
    sums: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def parts(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        sums[-1].append(((output - target).square().sum(), target.square().sum()))
        return output.sum() * 0

    with pytest.MonkeyPatch.context() as patch:
        for module in (hidden, transfer, losses):
            patch.setattr(module, "normalized_error", parts)
        for piece in pieces:
            sums.append([])
            objective(piece[None])
    layers = [[torch.stack(x).sum() for x in zip(*layer, strict=True)] for layer in zip(*sums, strict=True)]
    return torch.stack([error / square for error, square in layers]).mean()


def test_documents_apart_train_in_the_loop_and_what_cannot_is_refused(tmp_path: Path) -> None:
    data = _tokens([13, 19, 32, 8, 24, 32]).blocks(32, "packed")
    teacher = random_teacher("llama")
    student = build_student(teacher, "gla", window=8)
    bench = Workbench(student, teacher, frozenset(new_parameters(student)), data, 1, 2, 0, tmp_path)
    (part,) = Lora(rank=4).prepare(bench)
    log = train("lora", part.objective, part.groups, data, LoopConfig(3, 2, 0), tmp_path / "a.safetensors")
    assert len(log.losses) == 3 and log.tokens == 3 * 2 * 32
    for refused in (Matrix(), Logits(top_k=4), Transfer(weights=1.0)):
        with pytest.raises(ConversionError, match="joined"):
            refused.check_documents()


@given(st.floats(0.05, 0.95), st.integers(2, 9), st.integers(2, 40), st.integers(10, 60))
def test_a_mixture_keeps_its_shares_and_repeats_what_is_short(share: float, a: int, b: int, count: int) -> None:
    parts = [
        (_tokens([4 * a]).blocks(4), share),
        (Tokens(torch.full((4 * b,), 99), torch.tensor([0])).blocks(4), 1 - share),
    ]
    blocks = mixture(parts, count).blocks
    others = int((blocks == 99).all(-1).sum())
    assert others == max(1, round(count * (1 - share))) and len(blocks) - others == max(1, round(count * share))
    visits = torch.unique(blocks[(blocks != 99).any(-1)], dim=0, return_counts=True)[1]
    assert visits.max() - visits.min() <= 1


def test_shares_are_scaled_and_must_be_positive() -> None:
    assert shares_of({"a": 3, "b": 1}) == {"a": 0.75, "b": 0.25}
    with pytest.raises(ConversionError, match="the share of b is 0"):
        shares_of({"a": 1, "b": 0})


def test_a_stream_is_read_anew_and_only_as_far_as_needed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"document {i}"}) for i in range(3000)) + "\n{broken")
    with pytest.raises(ConversionError, match="line 3001"):
        read_corpus(file)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": f"document {i}"}) for i in range(300)))
    corpus = read_corpus(tmp_path / "b.jsonl", streaming=True)
    assert isinstance(corpus.train, Stream) and corpus.heldout == [f"document {i}" for i in range(9, 300, 10)]
    first, again = list(corpus.train), list(corpus.train)
    assert first == again == [f"document {i}" for i in range(300) if i % 10 != 9]
    tokenizer = Letters()
    tokens = read_tokens(corpus.train, tokenizer, limit=100)
    assert tokens.ids.numel() == 100 and tokenizer.calls < 15


def test_hub_datasets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name: str, config: str | None, streaming: bool) -> Any:
        asked.append((name, config, streaming))
        return {"train": Endless()}

    class Endless:
        column_names = None  # as of a dataset whose features are not known before it is read

        def __iter__(self) -> Any:
            return ({"text": f"row {i} " * 50} for i in range(10**9))

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("linearize.distill.reading._identity", lambda source: None)
    corpus = read_corpus("owner/name:part", streaming=True)
    assert asked == [("owner/name", "part", True)]
    assert sum(map(len, corpus.heldout)) >= 2_000_000 and next(iter(corpus.train)) == "row 0 " * 50
    assert read_tokens(corpus.train, Letters(), limit=50).ids.numel() == 50


def test_tokens_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_cache, "WORTH_KEEPING", 50)
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(f"text {i}" for i in range(100)))
    tokenizer = Letters()
    corpus = read_corpus(tmp_path / "a.txt")
    made = cached_tokens(corpus, tokenizer, 200)
    calls = tokenizer.calls
    again = cached_tokens(read_corpus(tmp_path / "a.txt"), tokenizer, 200)
    assert tokenizer.calls == calls and all(
        torch.equal(a, b) for a, b in zip(vars(made).values(), vars(again).values(), strict=True)
    )
    assert torch.equal(made.ids, read_tokens(corpus.train, tokenizer, 200).ids)
    (tmp_path / "a.txt").write_text((tmp_path / "a.txt").read_text() + "!" * 200)
    cached_tokens(read_corpus(tmp_path / "a.txt"), tokenizer, 200)
    other = Letters()
    other.bos_token_id = 7
    assert cached_tokens(corpus, other, 200).ids[0] == 7
    cached_tokens(corpus, tokenizer, 40)
    assert len(os.listdir(token_cache.cache_folder())) == 3
