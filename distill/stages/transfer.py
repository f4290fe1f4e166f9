"""Attention transfer: every mixer learns, in its own layer, what the teacher's attention did there.

One pass of the teacher through the student's body gives each mixer its input and its target; the teacher's output
goes on to the next layer, so that all layers train at once and none sees another's mistakes. (LoLCATs,
arXiv 2410.10254; RADLADS, arXiv 2505.03005.) With `teacher_forced: false` each mixer sees instead what the student's
layers before it made; no gradient crosses a layer in either case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from linearize.convert.calibration import routed
from linearize.convert.errors import ConversionError
from linearize.convert.mixers import Mixer
from linearize.convert.surgery import student_mixers
from linearize.distill.capture import Seen, watch_attention
from linearize.distill.layout import real_tokens, token_ids
from linearize.distill.losses import normalized_error
from linearize.distill.mixing import check_linear, mixing_matrix, teacher_matrix
from linearize.distill.parameters import Group
from linearize.distill.reference import Reference, last_hidden
from linearize.distill.stages.base import AdapterStage, Workbench, rates

_LEAST_WEIGHT = 1e-6  # of a student's attention weight inside a logarithm


class Transfer(AdapterStage):
    """Every mixer learns the outputs of the attention it replaces."""

    kind: Literal["transfer"] = "transfer"
    tokens: int = Field(200_000, ge=0, description="tokens to train on; 0 skips the stage")
    learning_rates: dict[Group, float] = rates(new=1e-2, adapters=3e-3)
    loss: Literal["normalized", "mse"] = Field(
        "normalized", description="normalized: squared error over the target's squares; mse: mean squared error"
    )
    scale: float = Field(1.0, gt=0, description="factor of the loss")
    at: Literal["output", "heads"] = Field("output", description="compare after o_proj (output) or before it (heads)")
    weights: float = Field(0.0, ge=0, description="weight of the cross-entropy between attention weights; 0 for none")
    window_dropout: float = Field(
        0.0, ge=0, lt=1, description="chance per layer and step that a mixer's window shrinks to the token itself"
    )
    stream: bool = Field(
        False, description="train layer by layer with activations on disk: memory holds one block and a batch"
    )
    teacher_forced: bool = Field(True, description="whether mixers see the teacher's hidden states or the student's")

    def check_documents(self) -> None:
        if self.weights:
            raise ConversionError(f"stage {self.label} compares attention weights; documents must be 'joined'")
        if self.stream:
            raise ConversionError(f"stage {self.label} is streamed; documents must be 'joined'")

    def objective(self, bench: Workbench) -> nn.Module:
        if self.weights:
            for mixer in student_mixers(bench.student):
                check_linear(mixer)
        return TransferObjective(bench.student, bench.reference(), self)

    def layer_error(self, mixer: Mixer, hidden_states: torch.Tensor, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's loss (a scalar) and the mixer's output `[B, T, D]`; differentiable in the mixer's tensors.

        The loss is the mean over what the block uses in the attention's place: one output, as a rule.

        Args:
            hidden_states: `[B, T, D]` that the mixer reads.
            seen: what the teacher's attention saw and made in this layer.
        """
        rope, stream = seen.rope, seen.stream if self.teacher_forced else mixer.stream
        with torch.enable_grad(), self._dropped(mixer), mixer.in_stream(stream):
            heads, output, _ = mixer.mix_and_project(hidden_states, rope, None, None, seen.cu_seqlens)
            further = mixer.further_outputs()
            mine, target = ([output, *further], seen.output) if self.at == "output" else ([heads], seen.heads)
            assert target is not None
            loss = torch.stack([self._distance(made, target) for made in mine]).mean()
            if self.weights:
                theirs = teacher_matrix(mixer, seen.hidden_states, rope)
                logs = mixing_matrix(mixer, hidden_states, rope).clamp_min(_LEAST_WEIGHT).log()
                loss = loss - self.weights * (theirs * logs).sum(-1).mean()
        return loss, output

    def _distance(self, mine: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mine, target = real_tokens(mine), real_tokens(target)
        if self.loss == "normalized":
            return normalized_error(mine, target)
        return F.mse_loss(mine.float(), target.float())

    @contextmanager
    def _dropped(self, mixer: Mixer) -> Iterator[None]:
        """Context: with the chance of `window_dropout`, the mixer's window is the token itself."""
        with ExitStack() as stack:
            options: Any = mixer.options
            if mixer.separable and options.window > 1 and float(torch.rand(())) < self.window_dropout:
                mixer.options = options.model_copy(update={"window": 1})
                stack.callback(setattr, mixer, "options", options)
            yield


class TransferObjective(nn.Module):
    """Mean over layers of the error of the mixers' outputs; by default `‖mine - teacher's‖² / ‖teacher's‖²`."""

    def __init__(self, student: PreTrainedModel, reference: Reference, settings: Transfer) -> None:
        super().__init__()
        self.student = student
        self.__dict__["reference"] = reference  # not a submodule: nothing of it trains
        self.settings = settings

    reference: Reference

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """batch as `token_ids` -> scalar loss, differentiable in the mixers' tensors."""
        input_ids = token_ids(batch)
        mixers = student_mixers(self.student)
        seen = watch_attention(self.reference, input_ids, heads=self.settings.at == "heads")
        losses: list[torch.Tensor] = []

        def error(mixer: Mixer, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return self.settings.layer_error(mixer, hidden_states, seen[mixer.layer_idx])

        def own(mixer: Mixer, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            loss, output = error(mixer, hidden_states)
            losses.append(loss)
            return output.detach(), None

        if self.settings.teacher_forced:
            with routed(mixers, error):  # through the mixers' own calls, which bring shards together
                losses += [mixer(seen[mixer.layer_idx].hidden_states)[0] for mixer in mixers]
        else:
            with torch.no_grad(), routed(mixers, own):
                last_hidden(self.student, input_ids)
        stacked = torch.stack(losses)
        return self.settings.scale * stacked.mean()
