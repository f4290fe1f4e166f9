"""The program that trains the bundled teacher, and the teacher that ships."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.recipes import train_teacher
from linearize.recipes.python_corpus import documents

TEACHER = Path(str(importlib.resources.files("linearize.recipes"))) / "assets" / "llama"


def _function(number: int) -> str:
    lines = (f"def scale_{number}(value):", '    """Scale."""', "    if value:", f"        return {number}")
    return "\n".join(lines) + "\n\n\n"


@pytest.fixture
def fake_stdlib(tmp_path: Path) -> Path:
    root = tmp_path / "stdlib"
    (root / "pydoc_data").mkdir(parents=True)
    (root / "site-packages").mkdir()
    for i in range(6):
        (root / f"module_{i}.py").write_text("".join(_function(10 * i + j) for j in range(10)))
    (root / "site-packages" / "other.py").write_text("unwanted = 1\n" * 50)
    (root / "textwrap.py").write_text("".join(_function(100 + j) for j in range(10)))
    (root / "pydoc_data" / "topics.py").write_text(
        "topics = {'if': 'The \"if\" statement\\n' 'chooses.\\n'}\n"
    )
    return root


@pytest.mark.parametrize(
    ("options", "dropout"), [("", 0.1), ("--dropout 0", 0.0)], ids=["plain", "no dropout"]
)
def test_writes_a_checkpoint_that_loads_and_a_card_that_matches(fake_stdlib, tmp_path, options, dropout):
    out = tmp_path / "teacher"
    sizes = "--hidden 32 --layers 2 --heads 4 --kv-heads 2 --head-dim 8 --intermediate 48 --vocab 300"
    budget = "--batch 2 --tokens 40960 --lr 0.01 --device cpu --seed 1"
    result = train_teacher.main(f"--out {out} --stdlib {fake_stdlib} {sizes} {budget} {options}".split())

    names = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert names | {"tokenizer.json", "tokenizer_config.json"} == {p.name for p in out.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.config.num_key_value_heads == 2 and model.config.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 0)
    assert result.loss < 5.0  # uniform over 300 tokens is 5.7
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"| {result.loss:.4f} | {result.perplexity:.3f} | {result.bits_per_byte:.4f} |" in card
    assert sizes in card and "--tokens 40960" in card
    assert f"--dropout {dropout} " in card and f"dropout {dropout}, warm-up" in card
    passages = len(documents("train", fake_stdlib))
    assert f": {passages:,} passages,\n" in card and "--passage-chars 600" in card


def test_seconds_bound_the_training(fake_stdlib, tmp_path, capsys):
    sizes = (
        "--hidden 16 --layers 1 --heads 2 --kv-heads 1 --head-dim 8 --intermediate 16 --vocab 280 --batch 1"
    )
    out = tmp_path / "teacher"
    command = f"--out {out} --stdlib {fake_stdlib} {sizes} --seconds 0.3 --device cpu"
    train_teacher.main(command.split())
    assert "--seconds 0.3" in (out / "README.md").read_text(encoding="utf-8")
    assert "first step after" in capsys.readouterr().out


def test_measure_is_the_same_in_any_batch_and_counts_the_last_partial_window(fake_stdlib):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    stream = torch.randint(50, (3 * train_teacher.CONTEXT + 18,), dtype=torch.int32)
    one, three = (train_teacher.measure(model, stream, 4000, batch=b) for b in (1, 3))
    assert one.tokens == len(stream) - 1
    assert one.loss == pytest.approx(three.loss, rel=1e-5)
    short = train_teacher.measure(model, stream[:100], 100)
    expected = model(input_ids=stream[None, :100].long(), labels=stream[None, :100].long()).loss
    assert short.loss == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    "text", ["", "a\tb\r\n\n\n   c  \n", "x = 1234.5e-6  # naïve 😀\n\t\tif y:\n    pass", "  two  "]
)
def test_shipped_tokenizer_round_trips(text):
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_shipped_tokenizer_makes_one_token_of_an_indentation_and_splits_digits():
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    pieces = [tokenizer.decode([i]) for i in tokenizer("if x:\n        return 123\n")["input_ids"]]
    assert " " * 8 in pieces and pieces[-4:] == [" 1", "2", "3", "\n"]


def test_shipped_teacher_is_small_and_grouped():
    model = AutoModelForCausalLM.from_pretrained(TEACHER)
    config = model.config
    assert config.model_type == "llama" and config.tie_word_embeddings
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings == 1024 and abs(config.vocab_size - 4096) <= 64
    assert model.num_parameters() <= 6_000_000
    assert sum(p.stat().st_size for p in TEACHER.rglob("*") if p.is_file()) <= 8_000_000
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_shipped_teacher_measures_what_its_card_says():
    held = documents("heldout")
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    assert all(tokenizer.decode(tokenizer(text)["input_ids"]) == text for text in held[:4])
    card = (TEACHER / "README.md").read_text(encoding="utf-8")
    row = re.search(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", card, re.MULTILINE)
    assert row is not None
    pieces = held[::10]  # shuffled, so from every module
    stream = train_teacher.pack(tokenizer, pieces)
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    result = train_teacher.measure(model, stream, sum(len(p.encode()) for p in pieces), batch=2)
    assert result.bits_per_byte == pytest.approx(float(row[3]), rel=0.03)
