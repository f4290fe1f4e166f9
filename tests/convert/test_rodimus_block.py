"""`rodimus-block`: a released model's block, loaded by its own names and written out as a loop; the calibrated start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from linearize.convert import as_teacher, build_student
from linearize.convert.errors import ConversionError
from linearize.convert.verify import relative_error
from tests.families import random_teacher

WIDTH, INNER, ROWS, RANK = 64, 128, 16, 16


def released() -> dict[str, torch.Tensor]:
    """Random tensors of one block, named as in the released checkpoints below `layers.{i}.mixer`."""
    shapes = {
        "fc.weight": (2 * INNER, WIDTH),
        "act_norm.weight": (INNER,),
        "out_proj.weight": (WIDTH, INNER),
        "inner_mixer.residual_weight": (INNER,),
        "inner_mixer.short_conv.conv1d.weight": (INNER, 1, 4),
        "inner_mixer.short_conv.conv1d.bias": (INNER,),
        "inner_mixer.in_proj.weight": (2 * ROWS, INNER),
        "inner_mixer.ch_gate_proj.0.weight": (RANK, INNER),
        "inner_mixer.ch_gate_proj.1.weight": (INNER, RANK),
        "inner_mixer.ch_gate_proj.1.bias": (INNER,),
        "inner_mixer.mem_gate_proj.weight": (2 * ROWS, INNER),
        "inner_mixer.mem_gate_proj.bias": (2 * ROWS,),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}


def paper_block(p: dict[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    """The formula, token by token in float64: h `[T, D]` -> `[T, D]`."""
    p, h = {name.removeprefix("inner_mixer."): t.double() for name, t in p.items()}, h.double()
    x, z = (h @ p["fc.weight"].T).chunk(2, -1)
    taps = p["short_conv.conv1d.weight"][:, 0]
    memory, out = h.new_zeros(ROWS, INNER), []
    for t in range(len(h)):
        past = [x[t - lag] if t >= lag else torch.zeros_like(x[0]) for lag in range(3, -1, -1)]
        inside = F.silu(sum(taps[:, i] * past[i] for i in range(4)) + p["short_conv.conv1d.bias"])
        q, k = (p["in_proj.weight"] @ inside).chunk(2)
        v = x[t] * torch.sigmoid(
            p["ch_gate_proj.1.weight"] @ (p["ch_gate_proj.0.weight"] @ x[t]) + p["ch_gate_proj.1.bias"]
        )
        a, b = (p["mem_gate_proj.weight"] @ inside + p["mem_gate_proj.bias"]).chunk(2)
        g, tau = F.softplus(a), torch.sigmoid(b)
        memory = torch.exp(-g * tau)[:, None] * memory + torch.outer(k / k.norm() * g**tau, v)
        y = ROWS**-0.5 * q @ memory + p["residual_weight"] * inside
        y = y * F.silu(z[t])
        out.append(y * torch.rsqrt(y.square().mean() + 1e-5) * p["act_norm.weight"])
    return torch.stack(out) @ p["out_proj.weight"].T


def block(**options: Any) -> Any:
    student: Any = build_student(random_teacher("llama", num_hidden_layers=1), "rodimus-block", **options)
    return student.mixers[0]


@torch.no_grad()
def test_a_released_block_computes_what_it_did() -> None:
    mixer, tensors = block(window=0, rows=ROWS), released()
    before = mixer.o_proj.weight.clone()
    mixer.load_released(tensors)
    h = torch.randn(1, 23, WIDTH, generator=torch.Generator().manual_seed(1))
    assert relative_error(mixer(h)[0][0].double(), paper_block(tensors, h[0])) < 1e-4
    assert torch.equal(mixer.o_proj.weight, before)


def test_what_is_no_released_block_is_refused() -> None:
    mixer, tensors = block(window=0, rows=ROWS), released()
    with pytest.raises(ConversionError, match=r"out_proj\.weight is missing"):
        mixer.load_released({name: t for name, t in tensors.items() if name != "out_proj.weight"})
    with pytest.raises(ConversionError, match="give the released model's rows"):
        block(window=0, rows=8).load_released(tensors)


@torch.no_grad()
@pytest.mark.parametrize("window", [0, 6])
def test_calibration_brings_the_block_nearer_to_the_teacher(window: int) -> None:
    """Nearer than nothing at all, or than the window alone; measured on other text than it was calibrated on."""
    fit, check = (torch.randint(2, 64, (24, 64), generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    teacher = random_teacher("llama", num_hidden_layers=1)
    student: Any = build_student(teacher, "rodimus-block", calibration=fit, window=window)
    control: Any = build_student(teacher, "swa", window=window or 1)
    x: list[torch.Tensor] = []
    handle = student.mixers[0].register_forward_pre_hook(lambda _, args, kwargs: x.append(kwargs), with_kwargs=True)
    student(input_ids=check, use_cache=False)
    handle.remove()
    with as_teacher(student):
        target, _ = student.mixers[0](**x[0])
    other = control.mixers[0](**x[0])[0] if window else torch.zeros_like(target)
    assert relative_error(student.mixers[0](**x[0])[0], target) < 0.95 * relative_error(other, target)
