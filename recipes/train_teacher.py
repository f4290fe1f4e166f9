"""Train the bundled teacher: a small Llama that learned Python from the standard library.

    python -m linearize.recipes.train_teacher --out DIR

One GPU and a few minutes are enough. The folder written holds the weights in bfloat16, the tokenizer and a
card whose numbers were all measured by this program on what it saved.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

from linearize.recipes.python_corpus import (
    HELD_OUT_MODULES,
    MAX_FILE_BYTES,
    PASSAGE_CHARS,
    SKIPPED_FOLDERS,
    documents,
)

END_OF_TEXT = "<|endoftext|>"
CONTEXT = 1024
PROMPT = "def read_config(path):\n"
_WARM_UP = 0.02
# The whole indentation of a line; newlines; words, single digits and signs, each with the space before it;
# other runs of white space.
_PIECES = r"(?<=\n)[ \t]+|\n+| ?[^\W\d]+| ?\d| ?[^\s\w]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class HeldOut:
    """What a model makes of the held-out text, read in separate windows of `CONTEXT` tokens."""

    loss: float
    """Mean negative log-likelihood, nats per token."""
    bits_per_byte: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> FastTokenizer:
    """A byte-level BPE tokenizer that gives back any text exactly; token 0 ends and begins documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return FastTokenizer(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def pack(tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """One int32 stream of all documents, each with the end-of-text token before it."""
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids.append(tokenizer.bos_token_id)
        ids.extend(encoding.ids)
    return torch.tensor(ids, dtype=torch.int32)


@torch.no_grad()
def measure(model: torch.nn.Module, stream: torch.Tensor, n_bytes: int, batch: int = 16) -> HeldOut:
    """Loss of every token of `stream` but the first, in windows that don't overlap or see each other."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    stream = stream.to(device).long()
    whole = (len(stream) - 1) // CONTEXT
    inputs = list(stream[: whole * CONTEXT].view(whole, CONTEXT).split(batch))
    targets = list(stream[1 : whole * CONTEXT + 1].view(whole, CONTEXT).split(batch))
    if whole * CONTEXT < len(stream) - 1:
        inputs.append(stream[None, whole * CONTEXT : -1])
        targets.append(stream[None, whole * CONTEXT + 1 :])
    total = 0.0
    for x, y in zip(inputs, targets, strict=True):
        if x.numel():
            logits = model(input_ids=x, use_cache=False).logits.float()
            total += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
    model.train(was_training)
    tokens = len(stream) - 1
    return HeldOut(total / tokens, total / math.log(2) / n_bytes, tokens, n_bytes)


def drop_out(model: LlamaForCausalLM, rate: float) -> list[RemovableHandle]:
    """Dropout, while training, on what embedding, attention and MLP add to the residual stream."""

    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return F.dropout(output[0], rate, module.training), *output[1:]
        return F.dropout(output, rate, module.training)

    parts = [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]
    return [part.register_forward_hook(hook) for part in (model.model.embed_tokens, *parts)]


def train(
    args: argparse.Namespace, model: LlamaForCausalLM, stream: torch.Tensor, held: torch.Tensor, n_bytes: int
) -> tuple[int, float, list[tuple[int, float]]]:
    """AdamW with a warm-up and a linear decay to zero on windows cut at random offsets.

    Returns:
        the tokens trained on, the seconds (without compiling and measuring), the held-out losses on the way.
    """
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    stream = stream.to(device)
    matrices = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": args.weight_decay}
    norms = {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, norms], lr=args.lr, betas=(0.9, 0.95), fused=cuda)
    hooks = drop_out(model, args.dropout) if args.dropout else []
    generator = torch.Generator().manual_seed(args.seed)
    span = torch.arange(CONTEXT + 1, device=device)

    def loss_of(window: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())

    step_loss = torch.compile(loss_of) if cuda and args.compile else loss_of
    per_step = args.batch * CONTEXT
    tokens, step, fraction, log = 0, 0, 0.0, []
    start = next_report = time.perf_counter()
    evaluating = 0.0
    while fraction < 1.0:
        rate = args.lr * max(0.0, min((fraction + 1e-4) / _WARM_UP, (1 - fraction) / (1 - _WARM_UP)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        offsets = torch.randint(len(stream) - CONTEXT - 1, (args.batch,), generator=generator).to(device)
        window = stream[offsets[:, None] + span].long()
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = step_loss(window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + per_step
        if step % 10 == 1:
            last = loss.item()  # waits for the device, so that the clock below is right
        now = time.perf_counter()
        if step == 1:
            print(f"first step after {now - start:.1f} s", flush=True)
            start = next_report = now
            last_report = (now, tokens)
        elapsed = now - start - evaluating
        fraction = tokens / args.tokens if args.seconds is None else elapsed / args.seconds
        if now >= next_report or fraction >= 1.0:
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                measured = measure(model, held, n_bytes)
            log.append((tokens, measured.loss))
            speed = (tokens - last_report[1]) / max(now - last_report[0], 1e-9)
            print(
                f"{elapsed:6.1f} s  step {step:5d}  {tokens / 1e6:5.1f} M tokens  {speed:8.0f} tok/s  "
                f"train {last:.4f}  held-out {measured.loss:.4f}  {measured.bits_per_byte:.4f} bits/byte",
                flush=True,
            )
            done = time.perf_counter()
            evaluating += done - now
            last_report, next_report = (done, tokens), done + args.report_every
    for hook in hooks:
        hook.remove()
    return tokens, elapsed, log


def sample(model: Any, tokenizer: Any, seed: int, length: int = 160) -> str:
    """A continuation of `PROMPT` drawn at temperature 0.7 from the 40 likeliest tokens."""
    torch.manual_seed(seed)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False).to(model.device)
    options = {"do_sample": True, "temperature": 0.7, "top_k": 40, "max_new_tokens": length}
    return tokenizer.decode(model.generate(**inputs, **options)[0], skip_special_tokens=True)


def card(
    args: argparse.Namespace, facts: dict[str, Any], result: HeldOut, log: list[tuple[int, float]], text: str
) -> str:
    """The README of the checkpoint."""
    names = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "batch", "lr")
    values = {n: getattr(args, n) for n in (*names, "weight_decay", "dropout", "passage_chars", "seed")}
    options = [f"--{n.replace('_', '-')} {v}" for n, v in {"tokens": facts["tokens"], **values}.items()]
    kept = [log[round(i * (len(log) - 1) / 7)] for i in range(8)] if len(log) > 8 else log
    curve = "\n".join(f"| {tokens / 1e6:.1f} M | {loss:.3f} |" for tokens, loss in kept)
    note = f" ({args.note})" if args.note else ""
    timed = "" if args.seconds is None else f"\nThe schedule followed the clock (`--seconds {args.seconds:g}`)."
    fence = "`" * 4
    return f"""---
license: apache-2.0
language: [code, en]
library_name: transformers
pipeline_tag: text-generation
tags: [python, llama, small]
---
# A small Python teacher

A {facts["parameters"]:,}-parameter `LlamaForCausalLM` that writes Python-like text. It exists to be converted:
small enough to convert on a CPU, real enough that what a conversion loses can be measured.

| | |
| --- | --- |
| layers, width, MLP | {args.layers}, {args.hidden}, {args.intermediate} (SwiGLU, RMSNorm eps 1e-5) |
| attention | {args.heads} query heads, {args.kv_heads} key/value heads, head dimension {args.head_dim} |
| positions | RoPE theta 10000, context {CONTEXT} tokens |
| embeddings | tied, {facts["vocab"]} tokens |
| weights | bfloat16, {facts["parameters"]:,} parameters |

**Tokenizer.** Byte-level BPE of {facts["vocab"]} tokens, trained on the training text; the indentation of a line is one
piece, digits stand alone, any text round-trips exactly. `{END_OF_TEXT}` (id 0) stood before each document; it is
bos, eos and pad, and isn't added by itself.

**Data.** The standard library of CPython {args.python_version}: {facts["documents"]:,} passages,
{facts["train_bytes"]:,} bytes, {facts["train_tokens"]:,} tokens (source files with their tests, and the language
reference that `help()` prints, cut into shuffled passages of whole functions, classes or paragraphs of about
{args.passage_chars} characters). Left out: the folders {", ".join(f"`{name}`" for name in sorted(SKIPPED_FOLDERS))};
files of 200 bytes or less, or of {MAX_FILE_BYTES:,} or more; tables of escapes and numbers. Held out, with their tests:
{", ".join(f"`{name}`" for name in HELD_OUT_MODULES)}.

**Training.** {facts["tokens"]:,} tokens ({facts["tokens"] / facts["train_tokens"]:.1f} passes) in
{facts["seconds"]:.0f} s on {facts["device"]}{note}, {facts["tokens"] / facts["seconds"]:,.0f} tokens a second;
{args.batch} windows of {CONTEXT} tokens a step; AdamW, peak learning rate {args.lr}, betas 0.9 and 0.95, weight decay
{args.weight_decay}, dropout {args.dropout}, warm-up over {_WARM_UP:.0%} and linear decay to zero.{timed}

**Held-out text**, measured on the saved weights in float32: {result.tokens:,} tokens, {result.bytes:,} bytes, read in
separate windows of {CONTEXT} tokens.

| loss, nats/token | perplexity | bits per byte |
| --- | --- | --- |
| {result.loss:.4f} | {result.perplexity:.3f} | {result.bits_per_byte:.4f} |

| trained on | held-out loss on the way |
| --- | --- |
{curve}

**A sample** (temperature 0.7, top-k 40, seed {args.seed}; the first line is the prompt):

{fence}python
{text}
{fence}

**Rebuild it** (with CPython {args.python_version}):

    python -m linearize.recipes.train_teacher --out DIR {" ".join(options)}

**Licence.** The weights are under the Apache License 2.0. They were trained on text under the Python Software
Foundation licence.
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m linearize.recipes.train_teacher", description="Train a teacher.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--stdlib", type=Path, help="a standard library folder (default: this interpreter's)")
    parser.add_argument("--python-version", default=platform.python_version(), help="version of --stdlib")
    parser.add_argument("--passage-chars", type=int, default=PASSAGE_CHARS, help="longest joined passage")
    parser.add_argument("--tokens", type=int, default=220_000_000, help="tokens to train on")
    parser.add_argument("--seconds", type=float, help="train this long instead, the schedule by the clock")
    sizes = {"hidden": 192, "layers": 4, "heads": 4, "kv-heads": 2, "head-dim": 64, "intermediate": 512}
    for name, default in {**sizes, "vocab": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--batch", type=int, default=64, help=f"windows of {CONTEXT} tokens a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.3, help="of the matrices; default 0.3")
    parser.add_argument("--dropout", type=float, default=0.1, help="on the residual branches; default 0.1")
    parser.add_argument("--report-every", type=float, default=15.0, help="seconds between measurements")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="on CUDA only")
    parser.add_argument("--note", help="a remark on the machine, for the card")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> HeldOut:
    """Corpus, tokenizer, training, saving, measuring, card; returns the held-out measurement."""
    args = parse(argv)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    texts, held_texts = (documents(split, args.stdlib, max_chars=args.passage_chars) for split in ("train", "heldout"))
    n_bytes = sum(len(t.encode()) for t in held_texts)
    tokenizer = train_tokenizer(texts, args.vocab)
    stream, held_out = pack(tokenizer, texts), pack(tokenizer, held_texts)
    print(f"{len(stream)} training tokens, {len(held_out)} held-out tokens", flush=True)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(args.device).train()
    tokens, seconds, log = train(args, model, stream, held_out, n_bytes)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    torch.set_float32_matmul_precision("highest")
    saved = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(args.device).eval()
    result = measure(saved, held_out, n_bytes)
    facts = {
        "parameters": saved.num_parameters(), "vocab": len(tokenizer), "documents": len(texts),
        "train_bytes": sum(len(t.encode()) for t in texts), "train_tokens": len(stream),
        "tokens": tokens, "seconds": seconds,
        "device": "one " + torch.cuda.get_device_name() if saved.device.type == "cuda" else "a CPU",
    }  # fmt: skip
    text = sample(saved, AutoTokenizer.from_pretrained(args.out), args.seed)
    (args.out / "README.md").write_text(card(args, facts, result, log, text), encoding="utf-8")
    print(json.dumps({**facts, "loss": result.loss, "bits_per_byte": result.bits_per_byte}), flush=True)
    return result


if __name__ == "__main__":
    main()
