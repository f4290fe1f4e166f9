"""A decoder whose blocks are read from disk one at a time, so that memory holds one block whatever the depth.

The model itself stands on the meta device. What surrounds the blocks (embedding, final norm, head) and each block are
loaded when they are needed and let go after. How the decoder calls its blocks (masks, positions, rotary tables) is
learnt by letting it call stand-ins once, so no family needs code of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from linearize.convert.attention_spec import find_layers
from linearize.convert.checkpoint import checkpoint_tensors, read_tensor, tensor_names, weight_files
from linearize.convert.errors import ConversionError


@dataclass(frozen=True)
class BlockCall:
    """The arguments with which the decoder calls one block, but for the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LayerStream:
    """One checkpoint, block by block: a teacher's, or an exported student's.

    Args:
        folder: a model folder with safetensors.
        dtype: of the teacher's tensors; a mixer's float32 tensors stay so.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str | torch.device = "cpu") -> None:
        self.folder, self.dtype, self.device = folder, dtype, torch.device(device)
        config = AutoConfig.from_pretrained(folder)
        eager = getattr(config, "attn_logit_softcapping", None) is not None
        with init_empty_weights(include_buffers=False):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager" if eager else "sdpa"
            )
        self.model.eval()
        for name, buffer in list(self.model.named_buffers()):
            set_module_tensor_to_device(self.model, name, self.device, buffer)
        self.layers, self.attention_name = find_layers(self.model, config)
        names = {module: name for name, module in self.model.named_modules()}
        self.block_names = [names[block] for block in self.layers]
        self.files = {name: file for file in weight_files(folder) for name in tensor_names(file)}
        self.tied: dict[str, str] = dict(getattr(self.model, "all_tied_weights_keys", None) or {})

    @contextlib.contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """The block with its tensors, inside the context; whatever was put into it is gone afterwards."""
        block, prefix = self.layers[index], self.block_names[index] + "."
        children, forward = dict(block.named_children()), block.__dict__.get("forward")
        self._load(name for name in self._parameters() if name.startswith(prefix))
        try:
            yield block
        finally:
            for name, child in children.items():
                setattr(block, name, child)
            assert block.__dict__.get("forward") is forward
            self._unload(prefix)

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[PreTrainedModel]:
        """The model with every tensor outside its blocks, inside the context."""
        prefixes = tuple(name + "." for name in self.block_names)
        outside = [name for name in self._parameters() if not name.startswith(prefixes)]
        self._load(outside)
        try:
            yield self.model
        finally:
            for name in outside:
                set_module_tensor_to_device(self.model, name, "meta")

    def call(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, list[BlockCall]]:
        """Inside `surroundings`: what enters the first block, `[B, T, D]`, and how each block is called.

        The calls hold for every batch of this shape: they depend on positions, not on tokens.
        """
        entered: list[torch.Tensor] = []
        calls: list[BlockCall] = []

        def stand_in(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            entered.append(hidden_states)
            calls.append(BlockCall(args, kwargs))
            return hidden_states

        with self._blocks_replaced(stand_in):
            self.model.get_decoder()(input_ids=input_ids.to(self.device), use_cache=False)
        return entered[0], calls

    def logits(self, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Inside `surroundings`: final norm and head of what leaves the last block, by the model's own forward."""

        def stand_in(_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return hidden_states

        with self._blocks_replaced(stand_in):
            return self.model(input_ids=input_ids.to(self.device), use_cache=False).logits

    @contextlib.contextmanager
    def _blocks_replaced(self, stand_in: Callable[..., torch.Tensor]) -> Iterator[None]:
        for block in self.layers:
            block.__dict__["forward"] = stand_in
        try:
            yield
        finally:
            for block in self.layers:
                del block.__dict__["forward"]

    # ------------------------------------------------------------------ tensors

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters(remove_duplicate=False))

    def read(self, name: str) -> torch.Tensor:
        """One tensor of the checkpoint, as it is stored.

        Raises:
            ConversionError: the checkpoint has none of this name.
        """
        stored = name if name in self.files else self.tied.get(name, name)
        if stored not in self.files:
            raise ConversionError(
                f"{self.folder} has no tensor {name}: this family stores its weights in another form, "
                "which cannot be streamed; convert without `stream`"
            )
        return read_tensor(self.files[stored], stored)

    def _load(self, names: Any) -> None:
        parameters = self._parameters()
        for name in list(names):
            tensor = self.read(name).to(parameters[name].dtype)
            if not bool(torch.isfinite(tensor).all()):
                raise ConversionError(f"{self.folder}: {name} holds NaN or infinite values; the checkpoint is damaged")
            set_module_tensor_to_device(self.model, name, self.device, tensor)

    def _unload(self, prefix: str) -> None:
        for name in self._parameters():
            if name.startswith(prefix):
                set_module_tensor_to_device(self.model, name, "meta")

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits `[B, T, vocab]`, block by block."""
        with self.surroundings():
            hidden, calls = self.call(input_ids)
        for i, call in enumerate(calls):
            with self.block(i) as block:
                hidden = run_block(block, hidden, call)
        with self.surroundings():
            return self.logits(hidden, input_ids)


class StreamedTensors(Mapping[str, torch.Tensor]):
    """A student's tensors, each read from disk when it is asked for: new and changed ones from an overlay, the others
    from the teacher.

    Args:
        student: the student on the meta device, for names and dtypes.
        overlay: tensor name -> safetensors file.
    """

    def __init__(self, student: PreTrainedModel, teacher: LayerStream, overlay: dict[str, Path]) -> None:
        self.teacher, self.overlay = teacher, overlay
        self.dtypes = {name: tensor.dtype for name, tensor in checkpoint_tensors(student).items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.overlay:
            return self.teacher.read(name).to(self.dtypes[name])
        return read_tensor(self.overlay[name], name).to(self.dtypes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.dtypes)

    def __len__(self) -> int:
        return len(self.dtypes)


def run_block(block: nn.Module, hidden_states: torch.Tensor, call: BlockCall) -> torch.Tensor:
    """The block's output `[B, T, D]`."""
    output = block(hidden_states, *call.args, **call.kwargs)
    return cast(torch.Tensor, output[0] if isinstance(output, tuple) else output)
