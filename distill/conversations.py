"""Conversations and preferences to token examples: chat templates, what is learned and what is only read.

Files are JSON lines: `{"messages": [{"role": ..., "content": ...}, ...]}` to imitate, `{"prompt": ..., "chosen": ...,
"rejected": ...}` to prefer, each a string or a list of messages, as TRL has them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from linearize.convert.errors import ConversionError
from linearize.distill.data import TokenBlocks
from linearize.distill.layout import IGNORED

Messages = list[dict[str, str]]

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The chat template of tokenizers that have none."""

_PASSAGE_CHARS = 400
_PROMPT_SHARE = 0.5  # of a passage that stands for the user's part


class Examples(TokenBlocks):
    """Examples in place of blocks of running text; order and batches as `TokenBlocks`.

    Args:
        examples: `[N, ..., T]`.
    """

    def __init__(self, examples: torch.Tensor) -> None:
        self.blocks = examples
        self.length = examples[0].numel() // 2  # one half are labels


def read_lines(source: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, each with `fields`.

    Raises:
        ConversionError: no such file, or a line is not of that form.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConversionError(f"data {source}: no such file; this stage reads JSON lines with {', '.join(fields)}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                rows.append({field: row[field] for field in fields})
            except (ValueError, KeyError, TypeError):
                raise ConversionError(
                    f"data {source}, line {number}: not a JSON object with {', '.join(fields)}"
                ) from None
    if not rows:
        raise ConversionError(f"data {source} holds no example")
    return rows


def conversations_of(documents: list[str]) -> list[Messages]:
    """Running text as conversations: the user gives the beginning of a passage, the assistant goes on."""
    made = []
    for document in documents:
        for start in range(0, len(document), _PASSAGE_CHARS):
            passage = document[start : start + _PASSAGE_CHARS]
            cut = int(len(passage) * _PROMPT_SHARE)
            if passage[:cut].strip() and passage[cut:].strip():
                parts = (("user", passage[:cut]), ("assistant", passage[cut:]))
                made.append([{"role": role, "content": text} for role, text in parts])
    return made


def preferences_of(documents: list[str], seed: int) -> list[dict[str, Any]]:
    """Running text as preferences: a passage's own end is preferred to another's."""
    pairs = conversations_of(documents)
    others = list(range(len(pairs)))
    random.Random(seed).shuffle(others)
    return [
        {"prompt": [user], "chosen": [own], "rejected": [pairs[other][1]]}
        for (user, own), other in zip(pairs, others, strict=True)
        if pairs[other][1] != own
    ]


def _template(tokenizer: Any) -> str | None:
    return None if getattr(tokenizer, "chat_template", None) else PLAIN_TEMPLATE


def encode_messages(messages: Messages, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of a conversation under its chat template, and labels: the assistant's tokens, else `IGNORED`.

    Raises:
        ConversionError: the template does not let the assistant's part be found.
    """
    template = _template(tokenizer)
    if template is None and "{% generation" in tokenizer.chat_template.replace("{%-", "{%"):
        made = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = made["input_ids"]
        return ids, [i if own else IGNORED for i, own in zip(ids, made["assistant_masks"], strict=True)]

    def render(part: Messages, ask: bool = False) -> str:
        return tokenizer.apply_chat_template(part, chat_template=template, tokenize=False, add_generation_prompt=ask)

    text, spans = render(messages), []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(messages[:i], ask=True), render(messages[: i + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise ConversionError(
                    "the tokenizer's chat template rewrites earlier turns; mark the assistant's part in it "
                    "with {% generation %} ... {% endgeneration %}"
                )
            spans.append((len(before), len(after)))
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    labels = [
        token if any(start <= first < end for start, end in spans) and last > first else IGNORED
        for token, (first, last) in zip(made["input_ids"], made["offset_mapping"], strict=True)
    ]
    return made["input_ids"], labels


def encode_completion(prompt: str | Messages, answer: str | Messages, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of prompt and answer, and labels: the answer's tokens. Strings are put together as they are."""
    if isinstance(prompt, str) and isinstance(answer, str):
        head = tokenizer(prompt, verbose=False)["input_ids"]
        tail = tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            tail = [*tail, tokenizer.eos_token_id]
        return head + tail, [IGNORED] * len(head) + tail
    ask = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    say = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    return encode_messages([*ask, *say], tokenizer)


def pad(ids: list[int], labels: list[int], length: int) -> torch.Tensor:
    """`[2, length]` of ids and labels, cut or padded on the right; nothing is learned at padding."""
    ids, labels = ids[:length], labels[:length]
    missing = length - len(ids)
    return torch.tensor([ids + [0] * missing, labels + [IGNORED] * missing])
