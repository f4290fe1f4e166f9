"""The training benchmark: FLOPs against an independent count, tables, a trace of the profiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from linearize.convert.errors import ConversionError
from linearize.convert.surgery import build_student
from linearize.distill.benchmarks import (
    ROWS,
    Settings,
    bench_training,
    flops,
    parts,
    random_teacher,
    report_json,
    report_text,
)
from linearize.distill.benchmarks.kernels import group_of, summarize
from linearize.distill.benchmarks.training import Bench
from linearize.distill.stages import Lora, Stage, Transfer

BATCH, CONTEXT = 2, 16


def tiny(**changes: object) -> Settings:
    small = dict(teacher="tiny", to="rodimus", context=CONTEXT, batch_size=BATCH, dtype=torch.float32, device="cpu")
    return Settings(**{**small, "steps": 2, "warmup": 1, **changes})  # type: ignore[arg-type]


def products(bench: Bench, stage: Stage, folder: Path) -> float:
    """FLOPs of the plain matrix products (not batched ones, not the head's) that torch sees in one step, per token."""
    objective, _ = bench.prepare(stage, folder)
    with FlopCounterMode(display=False) as counter:
        objective(bench.batch(0)).backward()
    seen = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    return sum(count for op, count in seen.items() if op in ("aten.mm", "aten.addmm")) / (BATCH * CONTEXT)


@pytest.mark.parametrize(("to", "error"), [("rodimus", 6e-3), ("gla", 1e-9), ("hgrn2", 1e-9), ("softmax", 1e-9)])
def test_flops_of_the_lora_stage_are_those_torch_counts(to: str, error: float, tmp_path: Path) -> None:
    bench = Bench(tiny(to=to))
    counted = products(bench, Lora(rank=8), tmp_path)
    assert flops.distillation_step(bench.student, CONTEXT, teacher=True).linear == pytest.approx(counted, rel=error)
    plain = products(bench, Lora(rank=8, ce_weight=1.0, kl_weight=0.0), tmp_path)
    assert flops.distillation_step(bench.student, CONTEXT, teacher=False).linear == pytest.approx(plain, rel=error)


def test_flops_of_transfer_are_those_torch_counts(tmp_path: Path) -> None:
    bench = Bench(tiny(to="gla"))
    counted = products(bench, Transfer(rank=8), tmp_path)  # the teacher's last MLP is not run
    assert flops.transfer_step(bench.student, CONTEXT).linear == pytest.approx(counted, rel=1e-9)
    assert not any("forward" in vars(module) for module in bench.student.modules())
    ids = bench.batch(0)
    whole = bench.student(input_ids=ids, use_cache=False).logits
    assert torch.equal(whole, Bench(tiny(to="gla")).student(input_ids=ids, use_cache=False).logits)


def test_flops_of_a_llama_of_one_billion() -> None:
    student = build_student(random_teacher("1b", torch.device("meta"), torch.bfloat16), "rodimus")
    found = flops.teacher_forward(student, 2048)
    assert found.linear == 2 * 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    assert found.mixing == 16 * 4 * 32 * 64 * (2048 + 1) / 2  # each query sees half of the keys, and itself
    assert found.head == 2 * 2048 * 128256 * 2047 / 2048
    assert flops.student_forward(student, 2048).mixing < found.mixing  # a small window and a state against 2,048 keys


def test_every_row_has_numbers_and_they_can_be_stored() -> None:
    report = bench_training(tiny())
    assert [row.name for row in report.rows] == list(ROWS)
    for row in report.rows:
        assert min(row.ms, row.forward_ms, row.tokens_per_s, row.flops.total, row.mfu, row.peak, row.first_s) > 0
        assert row.ms == pytest.approx(row.forward_ms + row.backward_ms + row.update_ms, rel=0.9)
        assert (row.trains > 0) == (row.backward_ms > 0) == ("forward" not in row.name)
    stored = json.loads(json.dumps(report_json(report)))
    assert stored["rows"][2]["flops"]["total"] == report.rows[2].flops.total
    assert all(name in report_text(report) for name in (*ROWS, "tiny to rodimus", "time"))


def test_parts_of_a_layer_run_forward_and_backward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = Bench(tiny())
    bench.prepare(Lora(), tmp_path)
    runs: list[int] = []

    def once(run: Callable[[], None], repeats: int) -> float:
        run()
        runs.append(repeats)
        return 1.0

    monkeypatch.setattr(parts, "time_ms", once)
    before = dict(vars(parts.student_mixers(bench.student)[1]))
    found = parts.time_parts(bench)
    assert {"norm, fused", "MLP", "mixer", "mixer without projections", "loss"} <= set(found)
    assert len(runs) == 2 * len(found)
    assert vars(parts.student_mixers(bench.student)[1]).keys() == before.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"teacher": "huge"}, "not a model"), ({"rows": ("nothing",)}, "choose from"), ({"device": "cuda"}, "CUDA")],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, object], message: str) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConversionError, match=message):
        bench_training(tiny(**changes))


def test_a_trace_is_summed_by_group_and_gaps_are_idle() -> None:
    events = [
        {"cat": "kernel", "name": "nvjet_tst_128x256", "ts": 1000.0, "dur": 500.0},
        {"cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel<4>", "ts": 1400.0, "dur": 300.0},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 2000.0, "dur": 100.0},
        {"cat": "kernel", "name": "nvjet_tst_128x256", "ts": 2100.0, "dur": 400.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9000.0},
    ]
    found = summarize(events, top=2)
    assert found.groups == pytest.approx({"matmul": 0.9, "elementwise and norms": 0.3, "copies and casts": 0.1})
    assert (found.span, found.idle, found.kernels) == pytest.approx((1.5, 0.3, 4))
    assert found.top[0][0] == "nvjet_tst_128x256" and found.top[0][1:] == pytest.approx((0.9, 2))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_turn", "loss kernel"),
        ("_scan", "mixer kernel: linear_attention"),
        ("pytorch_flash::flash_fwd_kernel", "softmax attention"),
        ("fmha_cutlassF_bf16_aligned", "softmax attention"),
        ("sm90_xmma_gemm_bf16bf16", "matmul"),
        ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>", "copies and casts"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("reduce_kernel<512, 1, MeanOps>", "elementwise and norms"),
    ],
)
def test_kernels_are_told_by_their_names(name: str, group: str) -> None:
    assert group_of(name, {"_turn": "linear_loss", "_scan": "linear_attention"}) == group
