"""What the stages minimise, against the formulas computed by hand; what they leave of the teacher."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from linearize.convert import build_student
from linearize.convert.calibration import teacher_route
from linearize.convert.errors import ConversionError
from linearize.convert.surgery import new_parameters
from linearize.distill.data import TokenBlocks
from linearize.distill.mixing import check_linear, mixing_matrix, teacher_matrix
from linearize.distill.reference import last_hidden
from linearize.distill.stages import (
    Anneal,
    Context,
    Hidden,
    Logits,
    Lora,
    Matrix,
    Preference,
    Round,
    Sft,
    Stage,
    Stepwise,
    Transfer,
    Workbench,
)  # fmt: skip
from linearize.distill.trainer import LoopConfig, train
from tests.families import random_teacher

DATA = TokenBlocks(torch.randint(2, 64, (16 * 24,), generator=torch.Generator().manual_seed(0)), 24)
IDS = DATA.blocks[:2]


def bench_of(to: str, state: Path = Path(), family: str = "llama", layers: int = 2, **options: Any) -> Workbench:
    teacher = random_teacher(family, num_hidden_layers=layers)
    student = build_student(teacher, to, calibration=DATA.blocks[:4], **options)
    return Workbench(student, teacher, frozenset(new_parameters(student)), DATA, 4, 2, 0, state / "stage")


def only_round(stage: Stage, bench: Workbench) -> Round:
    (part,) = stage.prepare(bench)
    return part


# ---------------------------------------------------------------------- transfer


@torch.no_grad()
@pytest.mark.parametrize("two_hop", [True, False])
def test_transfer_compares_both_hops_where_the_stream_keeps_the_first_alone(two_hop: bool) -> None:
    bench = bench_of("rodimus++", layers=1, window=4, two_hop=two_hop)
    objective = only_round(Transfer(), bench).objective
    mixer: Any = bench.student.model.layers[0].self_attn
    stream = bench.student.model.embed_tokens(IDS)
    x = bench.student.model.layers[0].input_layernorm(stream)
    rope = bench.student.model.rotary_emb(x, torch.arange(IDS.shape[1])[None])
    target = teacher_route(mixer, x, position_embeddings=rope, attention_mask=None)[0]
    q, k, v = mixer.project(x)
    y, _ = mixer.recurrence(mixer.tokens(x, q, k, v, rope, None, None), None)
    first = mixer.branch.scale * y
    with mixer.in_stream(stream):
        second = mixer.branch.window_scale * mixer.window_heads(x, first, rope, None, None, None)[0]
    outputs = [mixer.output(first + second), *([mixer.output(first)] if two_hop else [])]
    expected = sum((o - target).square().sum() / target.square().sum() for o in outputs) / len(outputs)
    torch.testing.assert_close(objective(IDS), expected, rtol=1e-4, atol=0)


def _lolcats_by_hand(bench: Workbench, W: int) -> torch.Tensor:
    """1000 · mean over layers of the mean squared error of y_i before o_proj (FORMULAS: LoLCATs window + linear)."""
    with torch.no_grad():
        states = bench.teacher.model(IDS, output_hidden_states=True).hidden_states
        losses = []
        for block, theirs, x in zip(bench.student.model.layers, bench.teacher.model.layers, states, strict=False):
            mixer, attention = block.self_attn, theirs.self_attn
            x = block.input_layernorm(x)
            rope = bench.teacher.model.rotary_emb(x, torch.arange(x.shape[1])[None])
            q, k, v = (
                getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, attention.head_dim)).double()
                for name in ("q", "k", "v")
            )
            q, k = (t.double() for t in mixer.spec.rotary(q.float(), k.float(), *rope, unsqueeze_dim=2))
            error, count = 0.0, 0
            for b in range(len(IDS)):
                for h in range(q.shape[2]):
                    kv = h // (q.shape[2] // k.shape[2])
                    maps = [
                        mixer.linear_rest.q_map.map.weight[h].double(),
                        mixer.linear_rest.k_map.map.weight[h].double(),
                    ]
                    phi_q, phi_k = (
                        torch.cat([(t @ w).softmax(-1), (-(t @ w)).softmax(-1)], -1)
                        for t, w in ((q[b, :, h], maps[0]), (k[b, :, kv], maps[1]))
                    )
                    s = q[b, :, h] @ k[b, :, kv].T / math.sqrt(attention.head_dim)
                    for i in range(s.shape[0]):
                        inside = [j for j in range(i + 1) if i - j < W]
                        outside = [j for j in range(i + 1) if i - j >= W]
                        gamma = math.exp(-float(mixer.linear_rest.log_weight[h]))  # per unit of the window's mass
                        m = s[i, inside].logsumexp(0)
                        weights = torch.zeros(i + 1, dtype=torch.float64)
                        weights[inside] = gamma * (s[i, inside] - m).exp()
                        weights[outside] = phi_k[outside] @ phi_q[i]
                        y = (weights @ v[b, : i + 1, kv]) / weights.sum()
                        target = s[i, : i + 1].softmax(0) @ v[b, : i + 1, kv]
                        error += float((y - target).square().sum())
                        count += y.numel()
            losses.append(error / count)
    return torch.tensor(1000 * sum(losses) / len(losses))


def test_the_loss_of_lolcats_equals_its_formula() -> None:
    bench = bench_of("lolcats", window=4)
    with torch.no_grad():
        for name in bench.new:
            parameter = bench.student.get_parameter(name)
            parameter.add_(0.3 * torch.randn_like(parameter))
    stage = Transfer(at="heads", loss="mse", scale=1000, learning_rates={"new": 1e-2})
    loss = only_round(stage, bench).objective(IDS).detach()
    torch.testing.assert_close(loss, _lolcats_by_hand(bench, 4), rtol=1e-4, atol=0)


@pytest.mark.parametrize("layers", [1, 2])
def test_transfer_forced_by_the_student_differs_after_the_first_layer(layers: int) -> None:
    bench = bench_of("rodimus", window=4, layers=layers)
    forced, own = (float(only_round(Transfer(teacher_forced=f), bench).objective(IDS).detach()) for f in (True, False))
    assert own == pytest.approx(forced, rel=1e-5) if layers == 1 else abs(own / forced - 1) > 1e-3


def test_window_dropout_makes_the_recurrence_carry_more() -> None:
    bench = bench_of("lolcats", window=8)
    kept, dropped = (only_round(Transfer(window_dropout=p), bench).objective for p in (0.0, 0.999))
    assert float(dropped(IDS)) > 1.5 * float(kept(IDS))
    assert all(mixer.options.window == 8 for mixer in bench.student.mixers)


def test_attention_weights_enter_as_cross_entropy() -> None:
    bench = bench_of("swa", window=24)
    plain, weighted = (only_round(Transfer(weights=w), bench).objective(IDS) for w in (0.0, 0.5))
    stream = bench.student.model.embed_tokens(IDS)
    x = bench.student.model.layers[0].input_layernorm(stream)
    rope = bench.student.model.rotary_emb(x, torch.arange(24)[None])
    entropies = []
    with torch.no_grad():
        hidden = bench.teacher.model(IDS, output_hidden_states=True).hidden_states
        for mixer, block, state in zip(bench.student.mixers, bench.student.model.layers, hidden, strict=False):
            weights = teacher_matrix(mixer, block.input_layernorm(state), rope)
            entropies.append(-(weights * weights.clamp_min(1e-6).log()).sum(-1).mean())
    torch.testing.assert_close(weighted - plain, 0.5 * torch.stack(entropies).mean(), rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------- matrices, hidden states


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_mixing_matrix_of_a_full_window_is_the_teachers(family: str) -> None:
    bench = bench_of("swa", family=family, window=24)
    objective = only_round(Matrix(learning_rates={"mixer": 1e-3}), bench).objective
    assert float(objective(IDS)) < 1e-4
    narrow = bench_of("swa", family=family, window=4)
    assert float(only_round(Matrix(learning_rates={"mixer": 1e-3}), narrow).objective(IDS)) > 0.1


def test_the_mixing_matrix_times_the_values_is_what_the_mixer_makes() -> None:
    bench = bench_of("lolcats", window=4)
    x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(1))
    rope = bench.student.model.rotary_emb(x, torch.arange(20)[None])
    for mixer in bench.student.mixers:
        with torch.no_grad():
            matrix = mixing_matrix(mixer, x, rope)
            values = mixer.expand(mixer.project(x)[2])
            heads, _ = mixer.mix(x, rope, None, None)
        assert matrix.shape == (2, 4, 20, 20) and float(matrix.triu(1).abs().max()) == 0
        torch.testing.assert_close(torch.einsum("bhts,bshv->bthv", matrix, values), heads, rtol=1e-4, atol=1e-5)


def test_mixers_that_are_not_linear_in_their_values_have_no_matrix() -> None:
    with pytest.raises(ConversionError, match="not linear"):
        check_linear(bench_of("gla", window=0).student.mixers[0])


@pytest.mark.parametrize("forced", [True, False])
def test_hidden_states_by_hand(forced: bool) -> None:
    bench = bench_of("swa", window=4)
    objective = only_round(Hidden(loss="l2", teacher_forced=forced, learning_rates={"mixer": 1e-3}), bench).objective
    teacher, student = bench.teacher.model, bench.student.model
    rope = student.rotary_emb(IDS.float(), torch.arange(24)[None])
    with torch.no_grad():
        x = y = teacher.embed_tokens(IDS)
        distances = []
        for theirs, mine in zip(teacher.layers, student.layers, strict=True):
            y = mine(x if forced else y, position_embeddings=rope)
            x = theirs(x, position_embeddings=rope)
            distances.append((x - y).norm(dim=-1).mean())
    torch.testing.assert_close(objective(IDS).detach(), torch.stack(distances).mean(), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- predictions


def test_the_kl_is_a_mean_over_tokens() -> None:
    """A sequence of one token has the same prediction at every position when attention says nothing."""
    bench = bench_of("swa", window=4)
    with torch.no_grad():
        for block in bench.teacher.model.layers:
            block.self_attn.o_proj.weight.zero_()
    objective = only_round(Logits(learning_rates={"all": 1e-4}), bench).objective
    with torch.no_grad():
        bench.student.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    rows = torch.arange(5, 9)[:, None]
    short, long = (float(objective(rows.expand(-1, T))) for T in (8, 16))
    assert short > 1e-4 and long == pytest.approx(short, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(("direction", "temperature"), [("forward", 1.0), ("reverse", 2.0)])
def test_distillation_by_hand(family: str, direction: str, temperature: float) -> None:
    bench = bench_of("swa", family=family, window=4)
    stage = Logits(direction=direction, temperature=temperature, ce_weight=0.3)
    loss = only_round(stage, bench).objective(IDS).detach()
    with torch.no_grad():
        q, p = (m(IDS, use_cache=False).logits[:, :-1].double() for m in (bench.student, bench.teacher))
    ce = -q.log_softmax(-1).gather(-1, IDS[:, 1:, None]).mean()
    q, p = ((t / temperature).log_softmax(-1) for t in (q, p))
    a, b = (p, q) if direction == "forward" else (q, p)
    torch.testing.assert_close(loss.double(), 0.3 * ce + (a.exp() * (a - b)).sum(-1).mean(), rtol=1e-4, atol=1e-6)


def test_cached_logits_of_the_whole_vocabulary_are_the_live_ones(tmp_path: Path) -> None:
    bench = bench_of("swa", tmp_path, window=4)
    live, whole, few = (
        only_round(Logits(top_k=k, cache=str(tmp_path / str(k)) if k else None), bench) for k in (None, 64, 4)
    )
    losses = [part.objective(bench.data.batch(0, 2, 0)) for part in (live, whole, few)]
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-4)
    assert 0 < float(losses[2]) < float(losses[0])
    tensors = list(live.groups[-1]["params"].values())
    for mine, theirs in zip(
        *(torch.autograd.grad(loss, tensors, allow_unused=True) for loss in losses[:2]), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)
    with pytest.raises(ConversionError, match="no logits for this text"):
        whole.objective(torch.full((1, 24), 7))


def test_a_larger_teacher_teaches(tmp_path: Path) -> None:
    larger = random_teacher("llama", seed=5, hidden_size=96)
    larger.save_pretrained(tmp_path / "larger")
    bench = bench_of("swa", window=24)
    stage = Logits(teacher=str(tmp_path / "larger"))
    stage.check(bench.student)
    with torch.no_grad():
        q, p = (m(IDS, use_cache=False).logits[:, :-1].log_softmax(-1) for m in (bench.student, larger))
    expected = float((p.exp() * (p - q)).sum(-1).mean())
    assert float(only_round(stage, bench).objective(IDS)) == pytest.approx(expected, rel=1e-4)
    random_teacher("llama", vocab_size=80).save_pretrained(tmp_path / "other")
    with pytest.raises(ConversionError, match="80 tokens"):
        Logits(teacher=str(tmp_path / "other")).check(bench.student)


# ---------------------------------------------------------------------- what is left of the teacher


@pytest.mark.parametrize(
    ("stage", "zero_copy"),
    [
        (Lora(rank=4, targets=["attention", "mlp"]), True),
        (Hidden(learning_rates={"new": 1e-2, "mixer": 1e-2}), True),
        (Hidden(learning_rates={"layer": 1e-2}), False),
        (Logits(learning_rates={"all": 1e-2}), False),
        (Context(context=24, kl_weight=1.0), False),
    ],
)
def test_whatever_trains_the_teacher_stays(stage: Stage, zero_copy: bool, tmp_path: Path) -> None:
    bench = bench_of("rodimus", window=4)
    with torch.no_grad():
        before = bench.teacher(IDS, use_cache=False).logits
    part = only_round(stage, bench)
    start = {name: p.clone() for name, p in bench.student.named_parameters()}
    trained = {name for group in part.groups for name in group["params"]}
    train("s", part.objective, part.groups, DATA, LoopConfig(3, 2, 0), tmp_path / "s.safetensors")
    moved = {name for name, p in bench.student.named_parameters() if not torch.equal(p, start[name])}
    assert moved <= trained and len(moved) > 0.6 * len(trained), trained - moved
    reference = bench.reference()
    assert reference.zero_copy == zero_copy
    with torch.no_grad():
        assert torch.equal(bench.teacher(IDS, use_cache=False).logits, before)
        with reference.model() as model:
            assert torch.equal(model(IDS, use_cache=False).logits, before)


def test_a_later_stage_merges_adapters_that_it_does_not_train(tmp_path: Path) -> None:
    bench = bench_of("rodimus", window=4)
    part = only_round(Lora(rank=4), bench)
    train("a", part.objective, part.groups, DATA, LoopConfig(3, 2, 0), tmp_path / "a.safetensors")
    with torch.no_grad():
        before = bench.student(IDS, use_cache=False).logits
        new = set(bench.new)
        part = only_round(Logits(learning_rates={"all": 1e-4, "new": 1e-3}), bench)
        torch.testing.assert_close(bench.student(IDS, use_cache=False).logits, before, rtol=1e-4, atol=1e-4)
    groups = {group["group"]: set(group["params"]) for group in part.groups}
    assert groups["new"] == new and "adapters" not in groups
    assert any("q_proj.weight" in name for name in groups["mixer"])


def _bytes_alive() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_the_teacher_of_lora_takes_no_memory(tmp_path: Path) -> None:
    """Tensors that stay after a step: weights, adapters, moments. Plain LoRA is the same stage without a teacher."""
    alive = {}
    empty = _bytes_alive()
    for kl_weight in (0.0, 1.0):
        bench = bench_of("rodimus", tmp_path, window=4, layers=4)
        part = only_round(Lora(rank=4, ce_weight=1.0, kl_weight=kl_weight), bench)
        state = tmp_path / f"{kl_weight}.safetensors"
        train("m", part.objective, part.groups, DATA, LoopConfig(1, 2, 0), state)
        alive[kl_weight] = _bytes_alive() - empty
        del bench, part
    assert alive[0.0] > 100_000 and alive[1.0] <= 1.1 * alive[0.0], alive


# ---------------------------------------------------------------------- rounds


def test_stepwise_replaces_layers_from_the_last() -> None:
    bench = bench_of("swa", layers=4, window=4)
    kept = build_student(bench.teacher, "swa", keep_softmax="0,1", window=4)
    rounds = Stepwise(rounds=2, learning_rates={"mixer": 1e-3}).prepare(bench)
    part = next(rounds)
    assert part.share == 0.5
    assert {name.split(".")[2] for group in part.groups for name in group["params"]} == {"2", "3"}
    with torch.no_grad():
        torch.testing.assert_close(last_hidden(bench.student, IDS), last_hidden(kept, IDS))
        part = next(rounds)
        whole = build_student(bench.teacher, "swa", window=4)
        torch.testing.assert_close(last_hidden(bench.student, IDS), last_hidden(whole, IDS))
    assert next(rounds, None) is None


def test_anneal_starts_at_the_teacher_and_leaves_the_last_value() -> None:
    bench = bench_of("swa", window=4)
    rounds = Anneal(option="window", values=[24, 8], learning_rates={"mixer": 1e-3}).prepare(bench)
    assert float(next(rounds).objective(IDS)) < 1e-6 < float(next(rounds).objective(IDS))
    assert next(rounds, None) is None
    assert [layer["options"]["window"] for layer in bench.student.config.linearize["layers"]] == [8, 8]
    with pytest.raises(ConversionError, match="'chunk'"):
        Anneal().check(bench.student)


def test_anneal_of_rat_grows_its_chunks() -> None:
    bench = bench_of("rat", window=0, chunk=1)
    losses = [float(part.objective(IDS)) for part in Anneal(values=[1, 4, 16], learn="transfer").prepare(bench)]
    assert losses[0] < 1e-8 < losses[1] < losses[2]


# ---------------------------------------------------------------------- conversations


class _Words:
    """A tokenizer of characters with a chat template, as far as the stages need one."""

    chat_template = None
    eos_token_id = 1

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": [ord(c) % 60 + 2 for c in text], "offset_mapping": [(i, i + 1) for i in range(len(text))]}

    def apply_chat_template(
        self, messages: list[dict], chat_template: str, add_generation_prompt: bool, **_: Any
    ) -> str:
        assert "generation" in chat_template
        text = "".join(f"{m['role'][0]}: {m['content']}\n" for m in messages)
        return text + "a: " * add_generation_prompt


def test_only_the_assistants_tokens_are_learned(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    turns = [("user", "hi"), ("assistant", "yo"), ("user", "so"), ("assistant", "no")]
    messages = str([{"role": role, "content": text} for role, text in turns]).replace("'", '"')
    file.write_text(f'{{"messages": {messages}}}\n')
    data = Sft(data=str(file)).load_examples([], _Words(), 40, 3, 0)
    ids, labels = data.blocks[0]
    text = "u: hi\na: yo\nu: so\na: no\n"
    learned = "".join(text[i] if labels[i] != -100 else "_" for i in range(len(text)))
    assert learned == "_________yo\n_________no\n"
    assert bool((labels[len(text) :] == -100).all()) and data.length == 40
    assert torch.equal(ids[labels != -100], labels[labels != -100])

    bench = bench_of("swa", window=4)
    loss = only_round(Sft(), bench).objective(data.blocks).detach()
    with torch.no_grad():
        log_q = bench.student(ids[None], use_cache=False).logits[0].log_softmax(-1)
    wanted = [-log_q[i, labels[i + 1]] for i in range(39) if labels[i + 1] != -100]
    assert float(loss) == pytest.approx(float(torch.stack(wanted).mean()), rel=1e-5)


def test_preference_equals_its_formula(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "hello", "chosen": " world", "rejected": " void of sense"}\n' * 3)
    stage = Preference(data=str(file), beta=0.5, rank=4)
    data = stage.load_examples([], _Words(), 24, 2, 0)
    assert data.blocks.shape == (2, 2, 2, 24) and data.length == 48
    bench = bench_of("swa", window=4)
    part = only_round(stage, bench)
    assert float(part.objective(data.blocks)) == pytest.approx(math.log(2), rel=1e-6)

    def answers() -> torch.Tensor:
        with torch.no_grad():
            ids, labels = data.blocks[0].unbind(1)
            log_q = bench.student(ids, use_cache=False).logits[:, :-1].double().log_softmax(-1)
            found = log_q.gather(-1, labels[:, 1:, None].clamp_min(0))[..., 0]
            return (found * (labels[:, 1:] != -100)).sum(-1)

    reference = answers()
    with torch.no_grad():
        for tensor in part.groups[0]["params"].values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    chosen, rejected = answers() - reference
    expected = -torch.nn.functional.logsigmoid(0.5 * (chosen - rejected))
    assert float(part.objective(data.blocks)) == pytest.approx(float(expected), rel=1e-3)
    train("p", part.objective, part.groups, data, LoopConfig(8, 1, 0), tmp_path / "p.safetensors")
    assert float(part.objective(data.blocks)) < float(expected)
