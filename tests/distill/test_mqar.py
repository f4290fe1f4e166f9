"""MQAR: what sequences look like, that they repeat, and that small models are built and trained on them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linearize.convert import ConversionError
from linearize.distill.evaluate.mqar import IGNORED, Task, accuracy, answer_logits, answer_loss, make_batch
from linearize.distill.evaluate.mqar_training import Training, small_model, train_on_mqar

TASK = Task(vocabulary=64, length=32, pairs=(4,), easier=(2,))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(1, 6), st.integers(1, 3), st.sampled_from([0.01, 1.0]), st.integers(0, 1000))
@settings(max_examples=40)
def test_every_key_is_asked_as_often_as_it_should_and_answered_by_its_own_value(
    pairs: int, repeats: int, power: float, seed: int
) -> None:
    task = Task(vocabulary=20, length=40, pairs=(pairs,), easier=(), repeats=repeats, power=power)
    ids, labels = make_batch(task, 5, pairs, generator(seed))
    assert ids.shape == labels.shape == (5, 40)
    for row, answers in zip(ids.tolist(), labels.tolist(), strict=True):
        keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == pairs and all(1 <= k < 10 for k in keys) and all(10 <= v < 20 for v in values)
        asked = [(k, a) for k, a in zip(row, answers, strict=True) if a != IGNORED]
        assert sorted(asked) == sorted(list(zip(keys, values, strict=True)) * repeats)
        rest = [t for t, a in zip(row[2 * pairs :], answers[2 * pairs :], strict=True) if a == IGNORED]
        assert set(rest) <= {0} and set(answers[: 2 * pairs]) == {IGNORED}


def test_batches_are_a_function_of_the_seed() -> None:
    first, again, other = (make_batch(TASK, 8, 4, generator(seed))[0] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_small_power_asks_soon() -> None:
    def mean_place(power: float) -> float:
        task = Task(vocabulary=64, length=256, pairs=(4,), easier=(), power=power)
        _, labels = make_batch(task, 256, 4, generator())
        return float((labels != IGNORED).nonzero()[:, 1].float().mean())

    assert mean_place(1.0) == pytest.approx((8 + 255) / 2, abs=8)
    assert mean_place(0.01) < 70


@pytest.mark.parametrize(
    "wrong",
    [{"length": 11, "pairs": (4,), "easier": ()}, {"vocabulary": 8, "length": 32, "pairs": (4,), "easier": ()}],
)
def test_tasks_that_do_not_fit_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Task(**wrong)


@torch.no_grad()
def test_loss_and_accuracy_are_of_the_answers_alone() -> None:
    model = small_model("softmax:0,gla:1", TASK, Training(width=32)).eval()
    ids, labels = make_batch(TASK, 16, 4, generator())
    full = model(input_ids=ids, use_cache=False).logits
    logits, _ = answer_logits(model, ids, labels)
    torch.testing.assert_close(logits, full[labels != IGNORED])
    expected = torch.nn.functional.cross_entropy(full.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    assert answer_loss(model, ids, labels) == pytest.approx(float(expected), rel=1e-5)
    model.get_output_embeddings().weight.zero_()
    assert accuracy(model, TASK, 4, examples=64) == 0  # the first of equals is the blank, which is never right


def test_a_window_is_set_where_a_mixer_has_one_and_the_plan_is_silent() -> None:
    pure = small_model("gla", TASK, Training(width=32))
    beside = small_model("gla", TASK, Training(width=32, window=5))
    window = small_model("swa", TASK, Training(width=32))
    assert [m.mixers[0].options.window for m in (pure, beside, window)] == [0, 5, 64]
    pair, plan = (small_model(to, TASK, Training(width=32)) for to in ("rat", "rat:0,softmax:1"))
    assert pair.mixers[1].options.chunk == plan.mixers[0].options.chunk == 4 and pair.mixers[0].options.window == 0
    with pytest.raises(ConversionError, match="no mixer"):
        small_model("gal", TASK, Training(width=32))


def test_training_stops_when_it_is_enough_and_keeps_the_better_rate() -> None:
    training = Training(
        width=16, heads=1, steps=4, batch_size=4, measure_every=2, enough=0.0, learning_rates=(1e-3, 1e-2)
    )
    outcome = train_on_mqar("gla", TASK, training)
    assert outcome.steps == 2 and outcome.learning_rate == 1e-3 and math.isfinite(outcome.loss)
    assert outcome.state_bytes == 2 * 16 * 16 * 4 and outcome.parameters > 64 * 16


def test_a_small_model_learns_to_recall() -> None:
    """A short convolution puts a key beside its value, softmax finds it: half of the answers by chance, then nearly all."""
    task = Task(vocabulary=64, length=32, pairs=(2,), easier=(), repeats=12)
    training = Training(
        width=64, steps=1500, batch_size=32, learning_rates=(5e-3,), weight_decay=0.0, measure_every=50, enough=0.93
    )
    outcome = train_on_mqar("mamba2:0,softmax:1", task, training)
    assert outcome.accuracy[2] >= 0.93 and outcome.steps < 1500
