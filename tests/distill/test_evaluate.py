"""Measurements equal independent code: plain loops, hand formulas, other ways to compute the same."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from linearize.convert import build_student
from linearize.convert.surgery import student_mixers
from linearize.distill.data import TokenBlocks
from linearize.distill.evaluate.branches import branch_use, mass_outside, using
from linearize.distill.evaluate.language import score_language, text_bytes
from linearize.distill.evaluate.positions import bucket_edges, loss_by_position, token_losses
from linearize.distill.evaluate.reading import last_logits, score_answers
from linearize.distill.evaluate.recovery import TaskScore, recovery
from linearize.distill.evaluate.speed import measure_speed
from linearize.distill.evaluate.state import effective_rank, half_life, state_use
from tests.families import random_teacher

VOCABULARY = 320


def byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer that writes any text, digits too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>", "<s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(["the cat sat on the mat and looked at the hat, Question: Answer:"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", pad_token="<pad>")
    fast.save_pretrained(folder)


@functools.cache
def teacher_model(**changes: Any) -> PreTrainedModel:
    return random_teacher("llama", vocab_size=VOCABULARY, num_hidden_layers=2, **changes)


def moved_student(to: str = "rodimus", **options: Any) -> PreTrainedModel:
    """A student whose own tensors and MLPs differ from the teacher's, as after merged adapters."""
    torch.manual_seed(1)
    student = build_student(teacher_model(), to, **{"window": 8, **options})
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "mlp.down_proj" in name:
                module = student.get_submodule(name.removesuffix(".weight"))
                module.weight = torch.nn.Parameter(parameter + 0.05 * torch.randn_like(parameter))
        for mixer in student_mixers(student):
            for name, parameter in mixer.new_parameters().items():
                parameter.add_(0.1 * torch.randn_like(parameter))
                if name == "branch.scale":
                    parameter.fill_(0.7)
    return student.eval()


def ids_of(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- language


@torch.no_grad()
def test_language_scores_equal_a_plain_loop(tmp_path: Path) -> None:
    student, teacher = moved_student(), teacher_model()
    byte_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    data = TokenBlocks(ids_of(5, 24).flatten(), 24)
    score = score_language(student, data, batch_size=2, teacher=teacher, tokenizer=tokenizer)
    losses, teacher_losses, kls, first, fifth = [], [], [], [], []
    for row in data.blocks:
        mine = student(row[None], use_cache=False).logits[0, :-1].double()
        theirs = teacher(row[None]).logits[0, :-1].double()
        for q, p, label in zip(mine, theirs, row[1:].tolist(), strict=True):
            q, p = q.softmax(-1).tolist(), p.softmax(-1).tolist()
            losses.append(-math.log(q[label]))
            teacher_losses.append(-math.log(p[label]))
            kls.append(sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True)))
            best = max(range(VOCABULARY), key=p.__getitem__)
            order = sorted(range(VOCABULARY), key=q.__getitem__, reverse=True)
            first.append(order[0] == best)
            fifth.append(best in order[:5])

    def mean(values: list) -> float:
        return sum(values) / len(values)

    assert score.perplexity == pytest.approx(math.exp(mean(losses)), rel=1e-5)
    assert score.teacher_perplexity == pytest.approx(math.exp(mean(teacher_losses)), rel=1e-5)
    assert score.kl == pytest.approx(mean(kls), rel=1e-4) and score.kl > 0.01
    assert score.top1_agreement == pytest.approx(mean(first)) and score.top5_agreement == pytest.approx(mean(fifth))
    assert 0 < mean(first) < mean(fifth) < 1, "the two agreements must be told apart"
    size = sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in data.blocks)
    assert score.bytes == size and score.byte_perplexity == pytest.approx(math.exp(sum(losses) / size), rel=1e-5)


def test_bytes_are_those_of_the_text(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts = ["the cat é sat", "日本 on the mat"]
    for text in texts:
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text).input_ids]])
        assert text_bytes(ids, tokenizer) == len(text.encode())


# ---------------------------------------------------------------------- reading, positions


@pytest.mark.parametrize("piece", [1, 7, 16, 64])
def test_reading_in_pieces_equals_reading_at_once(piece: int) -> None:
    student, ids = moved_student(), ids_of(2, 40)
    with torch.no_grad():
        logits = student(ids, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    torch.testing.assert_close(token_losses(student, ids, piece), expected, rtol=1e-4, atol=1e-4)
    for keep in (1, 5, 40):
        torch.testing.assert_close(last_logits(student, ids, keep, piece), logits[:, -keep:], rtol=1e-3, atol=1e-4)


def test_buckets_hold_every_position_once() -> None:
    for tokens in (2, 3, 15, 16, 17, 32, 33, 100, 4096, 32768):
        edges = bucket_edges(tokens)
        assert edges[0] == 1 and edges[-1] == tokens and all(a < b for a, b in pairwise(edges))


def test_loss_by_position_averages_what_a_loop_finds() -> None:
    student, ids = moved_student(), ids_of(3, 70)
    curve = loss_by_position(student, ids, piece=32)
    losses = torch.cat([token_losses(student, row[None], 70) for row in ids])
    assert curve.edges == [1, 16, 32, 64, 70] and curve.counts == [45, 48, 96, 18]
    for (start, end), loss in zip([(1, 16), (16, 32), (32, 64), (64, 70)], curve.loss, strict=True):
        assert loss == pytest.approx(float(losses[:, start - 1 : end - 1].mean()), rel=1e-4)


_LONG_READING = """
import resource, torch
from linearize.convert import build_student
from linearize.distill.evaluate.positions import token_losses
from tests.families import random_teacher
torch.set_num_threads(1)
teacher = random_teacher("llama", vocab_size=4096, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32768)
student = build_student(teacher, "rodimus", window=16, rank=2)
ids = torch.randint(4096, (1, 32768))
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
token_losses(student, ids[:, :2048]); short = peak()
losses = token_losses(student, ids); long = peak()
assert bool(losses.isfinite().all()) and losses.shape == (1, 32767)
print(short, long)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read as Linux gives it")
def test_a_text_of_32k_tokens_is_read_in_bounded_memory() -> None:
    """All its logits are 512 MiB, one attention matrix 8 GiB."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", _LONG_READING], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    short, long = map(int, done.stdout.split())
    assert long - short < 100, f"{short} MiB for 2K tokens, {long} MiB for 32K"


def test_answers_are_scored_as_greedy_generation_writes_them() -> None:
    student = moved_student()
    prompts = ids_of(3, 30)
    made = student.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=4, min_new_tokens=4,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    assert all(a.exact and a.token_share == 1 for a in score_answers(student, made, [4, 3, 1], piece=8))
    wrong = made.clone()
    wrong[:, -1] = (wrong[:, -1] + 1) % VOCABULARY
    scored = score_answers(student, wrong, [4, 4, 4], piece=8)
    assert [a.token_share for a in scored] == [0.75] * 3 and not any(a.exact for a in scored)
    with torch.no_grad():
        log_p = student(wrong, use_cache=False).logits[:, -5:-1].log_softmax(-1)
    expected = -log_p.gather(-1, wrong[:, -4:, None]).mean((1, 2))
    assert [a.nats for a in scored] == pytest.approx(expected.tolist(), rel=1e-4)


# ---------------------------------------------------------------------- branches


@pytest.mark.parametrize("to", ["rodimus", "linear", "gla", "lolcats"])
def test_one_branch_alone_is_the_student_built_of_it(to: str) -> None:
    """The window alone is `swa`, the recurrence alone the same mixer without a window."""
    ids = ids_of(2, 40)
    hybrid, swa = moved_student(to), build_student(teacher_model(), "swa", window=8)
    pure = moved_student(to, window=0)
    for pair in zip(student_mixers(hybrid), student_mixers(swa), student_mixers(pure), strict=True):
        mine = pair[0].state_dict()
        pair[2].load_state_dict({name: mine[name] for name in pair[2].state_dict()})
    mlps = {n: p for n, p in hybrid.state_dict().items() if "mlp" in n}
    for other in (swa, pure):
        for name, tensor in mlps.items():
            other.get_submodule(name.removesuffix(".weight")).weight = torch.nn.Parameter(tensor)
    with torch.no_grad():
        for use, other in (("window", swa), ("recurrence", pure)):
            if (to, use) == ("lolcats", "recurrence"):
                continue  # beside a window its sums hold only what left it
            with using(student_mixers(hybrid), use):  # type: ignore[arg-type]
                mine = hybrid(ids, use_cache=False).logits
            torch.testing.assert_close(mine, other.eval()(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
            assert (mine - hybrid(ids, use_cache=False).logits).abs().max() > 1e-2, "the branch changes nothing"


def test_branch_use_measures_each_branch_and_the_teachers_softmax() -> None:
    student, teacher, ids = moved_student(), teacher_model(), ids_of(2, 48)
    use = branch_use(student, teacher, ids)
    assert use is not None and use.tokens == 2 * 47
    for branch in ("both", "window", "recurrence"):
        with using(student_mixers(student), branch):  # type: ignore[arg-type]
            assert use.loss[branch] == pytest.approx(float(token_losses(student, ids).mean()), rel=1e-4)  # type: ignore[index]
    assert len({round(loss, 3) for loss in use.loss.values()}) == 3

    eager = AutoModelForCausalLM.from_config(teacher.config, attn_implementation="eager").eval()
    eager.load_state_dict(teacher.state_dict())
    with torch.no_grad():
        attentions = eager(ids, output_attentions=True).attentions
    for layer, weights in zip(use.layers, attentions, strict=True):
        for head, measured in enumerate(layer.mass_outside):
            outside = [float(weights[b, head, t, : t - 7].sum()) for b in range(2) for t in range(8, 48)]
            assert measured == pytest.approx(sum(outside) / len(outside), rel=1e-4)
        assert layer.recurrent_share > 0
    assert mass_outside(teacher, ids, {0: 48}) == {0: [0.0] * 4}
    assert branch_use(build_student(teacher, "swa", window=8), teacher, ids) is None


def test_the_recurrent_share_is_zero_when_the_recurrence_is_silent() -> None:
    student = build_student(teacher_model(), "linear", window=8).eval()
    with torch.no_grad():
        for mixer in student_mixers(student):
            mixer.branch.scale.zero_()  # type: ignore[union-attr, operator]
    use = branch_use(student, teacher_model(), ids_of(1, 32))
    assert use is not None and [layer.recurrent_share for layer in use.layers] == [0, 0]


# ---------------------------------------------------------------------- state


@given(st.integers(1, 6), st.integers(0, 99))
def test_effective_rank_counts_equal_directions(rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(8, rank, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(6, rank, generator=generator)).Q
    assert float(effective_rank(3.7 * u @ v.mT)) == pytest.approx(rank, rel=1e-4)


def test_effective_rank_by_hand() -> None:
    p = [0.7, 0.2, 0.1]
    matrix = torch.diag(torch.tensor([7.0, 2.0, 1.0]))
    assert float(effective_rank(matrix)) == pytest.approx(math.exp(-sum(x * math.log(x) for x in p)), rel=1e-5)
    assert float(effective_rank(torch.zeros(3, 3))) == 0


@given(st.floats(0.3, 3000))
def test_an_exponential_decay_has_its_own_half_life(life: float) -> None:
    after = [1, 2, 4, 8, 16, 32, 64]
    assert half_life([0.5 ** (t / life) for t in after], after) == pytest.approx(life, rel=1e-6)


def test_half_lives_are_those_of_the_decays() -> None:
    """RetNet's are constant and known; linear attention has none."""
    ids = ids_of(2, 96)
    use = state_use(build_student(teacher_model(), "retnet", window=0), ids, stretch=48)
    assert use is not None and use.tokens == 48 and len(use.layers) == 2
    known = [math.log(2) / -math.log1p(-(2.0 ** (-5 - head))) for head in range(4)]
    for layer in use.layers:
        assert layer.half_life == pytest.approx(known, rel=2e-3) and layer.shape == (16, 16)
        assert all(1 < rank < 16 for rank in layer.rank)
    still = state_use(build_student(teacher_model(), "linear"), ids, stretch=48)
    assert still is not None and still.layers[0].half_life == [None] * 4
    assert state_use(build_student(teacher_model(), "swa"), ids) is None


def test_half_lives_do_not_depend_on_the_units_of_a_state() -> None:
    """mLSTM keeps its matrices divided by a running maximum of its input gates."""
    torch.manual_seed(0)
    student = build_student(teacher_model(), "mlstm", window=0).eval()
    with torch.no_grad():
        for mixer in student_mixers(student):
            mixer.recurrence.key_weight.normal_(std=2)  # type: ignore[union-attr, operator]
    use = state_use(student, ids_of(1, 96), stretch=48)
    forget = 15 * torch.tanh(student_mixers(student)[0].recurrence.forget_bias / 15)  # type: ignore[operator, union-attr]
    known = (math.log(2) / -torch.nn.functional.logsigmoid(forget)).tolist()
    assert use is not None and use.layers[0].half_life == pytest.approx(known, rel=2e-3)


def test_the_state_is_the_one_the_cache_holds() -> None:
    student, ids = moved_student(), ids_of(1, 60)
    use = state_use(student, ids, stretch=20)
    cache = student.new_cache()
    with torch.no_grad():
        student(ids[:, :40], past_key_values=cache, use_cache=True)
    assert use is not None
    for layer, held in zip(use.layers, cache.layers, strict=True):
        assert layer.rank == pytest.approx(effective_rank(held.state["memory"][0]).tolist(), rel=1e-3)


# ---------------------------------------------------------------------- speed, recovery


def test_speed_names_every_model_and_length_and_counts_the_cache() -> None:
    student, teacher = moved_student(), teacher_model()
    score = measure_speed({"student": student, "teacher": teacher}, (16, 48), decoded=4)
    assert [(p.model, p.context) for p in score.points] == [
        ("student", 16), ("student", 48), ("teacher", 16), ("teacher", 48),
    ]  # fmt: skip
    held = [p.cache_bytes for p in score.points]
    assert held[0] == held[1] == sum(m.state_bytes(48, torch.float32) for m in student_mixers(student))
    assert held[2:] == [2 * 2 * (context + 4) * 2 * 16 * 4 for context in (16, 48)]
    assert all(p.prefill > 0 and p.decode > 0 for p in score.points)


@given(st.floats(-1, 2), st.floats(0.01, 1), st.floats(0, 0.9))
def test_recovery_is_linear_between_chance_and_teacher(share: float, skill: float, chance: float) -> None:
    assert recovery(chance + share * skill, chance + skill, chance) == pytest.approx(share, abs=1e-9)
    assert recovery(chance, chance, chance) is None and recovery(1.0, chance - skill, chance) is None


def test_a_teacher_near_chance_is_marked() -> None:
    assert TaskScore("t", "acc", 0.3, 0.30, 0.25, 100, 0.05, 0.046).teacher_is_at_chance
    assert not TaskScore("t", "acc", 0.3, 0.40, 0.25, 100, 0.05, 0.046).teacher_is_at_chance
