"""A teacher's surgery measured on text: calibrated as a conversion does it, on held-out text, without training."""

from __future__ import annotations

import torch

from linearize.convert.checkpoint import load_teacher, load_tokenizer
from linearize.convert.plan import Plan
from linearize.convert.surgery import build_student
from linearize.convert.surgery_error import SurgeryError, surgery_error
from linearize.distill.data import TokenBlocks, tokenize
from linearize.distill.device import choose_device
from linearize.recipes.corpus import open_corpus
from linearize.recipes.teachers import Teacher

CALIBRATION_TOKENS = 4_096
MEASURED_TOKENS = 2_048
CONTEXT = 512


def measure_surgery(
    teacher: Teacher, plan: Plan, data: str | None = None, seed: int = 0, device: str = "auto"
) -> SurgeryError:
    """Build the student of `plan` and compare it with its teacher on held-out text.

    Args:
        data: text to calibrate and measure on; None for the standard library of this Python.
        device: "auto" takes a GPU when there is one.

    Raises:
        ConversionError: the teacher has no tokenizer, or the text is too short.
    """
    device = choose_device(device)
    tokenizer = load_tokenizer(teacher.folder)
    model = load_teacher(teacher.folder, torch.float32 if torch.device(device).type == "cpu" else "auto", device)
    length = min(CONTEXT, getattr(model.config, "max_position_embeddings", None) or CONTEXT)
    corpus = open_corpus(data, seed, passages=512)
    train = TokenBlocks(tokenize(corpus.train, tokenizer, CALIBRATION_TOKENS + length), length, "the training text")
    heldout = TokenBlocks(
        tokenize(corpus.heldout, tokenizer, 16 * MEASURED_TOKENS), length, "the held-out text"
    ).spread(MEASURED_TOKENS)
    torch.manual_seed(seed)
    sample = train.batch(0, max(1, CALIBRATION_TOKENS // length), seed)
    return surgery_error(build_student(model, plan, calibration=sample), heldout.blocks)
