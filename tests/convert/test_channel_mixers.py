"""Channel mixers: they start as the teacher's MLP, keep its names, and learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from linearize.convert.channel_mixers import CHANNEL_MIXERS, ChannelMixer
from linearize.convert.channel_mixers.base import teacher_route
from linearize.convert.channel_mixers.cdmoe import BLOCK, CDMoE
from tests.families import FAMILIES, random_teacher

WIDTH = 64


def mixer_of(name: str, family: str = "llama", shake: bool = False, **options: Any) -> ChannelMixer:
    mlp = random_teacher(family, num_hidden_layers=1).model.layers[0].mlp
    torch.manual_seed(1)
    mixer = CHANNEL_MIXERS[name].from_mlp(mlp, 0, WIDTH, **options)
    if shake:
        with torch.no_grad():
            for parameter in mixer.new_parameters().values():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(CHANNEL_MIXERS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_start_equals_the_teacher_to_the_bit(name: str, family: str, dtype: torch.dtype) -> None:
    mixer = mixer_of(name, family)
    keep = {module: mixer.get_submodule(module) for module in mixer.float32_modules}
    mixer.to(dtype)
    for module in keep.values():
        module.float()
    x = noise(2, 9).to(dtype)
    assert torch.equal(mixer(x), mixer.mlp(x))


@pytest.mark.parametrize("name", sorted(CHANNEL_MIXERS))
def test_the_teachers_tensors_keep_their_names_and_are_shared(name: str) -> None:
    mixer = mixer_of(name, "phi3")
    old, now = dict(mixer.mlp.named_parameters()), dict(mixer.named_parameters())
    assert set(now) == set(old) | set(mixer.new_parameters()) == set(mixer.state_dict())
    assert all(now[tensor] is parameter for tensor, parameter in old.items())
    assert set(mixer.new_parameters()).isdisjoint(old) and mixer.new_parameters()


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(CHANNEL_MIXERS))
def test_the_route_leads_back_to_the_teacher(name: str) -> None:
    mixer = mixer_of(name, shake=True)
    x = noise(1, 5)
    assert not torch.equal(mixer(x), mixer.mlp(x))
    mixer.__dict__["route"] = teacher_route
    assert torch.equal(mixer(x), mixer.mlp(x))


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(CHANNEL_MIXERS))
def test_adapters_reach_the_shared_part_and_leave_the_teacher_alone(name: str) -> None:
    mixer = mixer_of(name)
    x = noise(1, 5)
    before = mixer.mlp(x)
    mixer.down_proj = torch.nn.Sequential(mixer.down_proj, torch.nn.Linear(WIDTH, WIDTH))
    assert torch.equal(mixer.mlp(x), before)
    assert (mixer(x) - before).abs().max() > 0.1


@pytest.mark.parametrize("name", sorted(CHANNEL_MIXERS))
def test_gradients_reach_every_new_tensor_after_the_first_step(name: str) -> None:
    mixer = mixer_of(name)
    target = noise(2, 9).flip(1)
    optimizer = torch.optim.SGD(mixer.new_parameters().values(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (mixer(noise(2, 9)) - target).square().mean().backward()
        optimizer.step()
    dead = [n for n, p in mixer.new_parameters().items() if not p.grad.abs().sum() > 0]
    assert not dead


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(CHANNEL_MIXERS))
def test_every_token_is_mixed_by_itself(name: str) -> None:
    """Also over a block's border; bfloat16 stays finite."""
    mixer = mixer_of(name, shake=True)
    x = noise(1, BLOCK + 3)
    whole = mixer(x)
    for t in (0, BLOCK - 1, BLOCK, BLOCK + 2):
        assert torch.allclose(mixer(x[:, t : t + 1])[:, 0], whole[:, t], atol=1e-4)
    assert torch.isfinite(mixer(30 * x)).all()


@pytest.mark.parametrize("name", sorted(CHANNEL_MIXERS))
def test_options_and_channel_mixers_say_what_they_are(name: str) -> None:
    mixer = CHANNEL_MIXERS[name]
    assert mixer.name == name and mixer.__doc__
    assert all(field.description for field in mixer.Options.model_fields.values())


@torch.no_grad()
def test_cdmoe_retrieves_the_best_of_all_experts() -> None:
    """The top k of all N = 36 sums, written out over every expert, weighted by its score."""
    mixer = mixer_of("cdmoe", shake=True, experts=36, heads=3, top_k=5, key_dim=8)
    assert isinstance(mixer, CDMoE)
    x = noise(7)
    query = mixer.product_keys.query(x).view(7, 3, 2, 8)
    rows, columns = (torch.einsum("nhd,hed->nhe", query[:, :, i], mixer.product_keys.keys[:, i]) for i in (0, 1))
    scores = (rows[..., :, None] + columns[..., None, :]).flatten(-2)
    kept = scores >= scores.topk(5).values[..., -1:]
    shared, experts = mixer.mlp(x), mixer.private_experts
    act = F.silu((shared @ experts.down.T)[:, None] * scores) * kept
    expected = shared + act.sum(1) @ experts.up
    assert torch.allclose(mixer(x), expected, atol=1e-5)


@pytest.mark.parametrize("options", [{"experts": 1000}, {"experts": 16, "top_k": 5}, {"rank": 3}])
def test_cdmoe_refuses_what_it_cannot_build(options: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        mixer_of("cdmoe", **options)
