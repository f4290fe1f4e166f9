"""Training under DeepSpeed: ZeRO 1 and 2 through accelerate. Parameters stay whole in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from linearize.convert.errors import ConversionError
from linearize.distill.placement import Groups, Placement, adamw
from linearize.distill.training_state import Moments


class Zero(Placement):
    """Gradients and moments in pieces; DeepSpeed averages, clips and steps.

    Raises:
        ConversionError: DeepSpeed is not installed, or the stage is 3, whose parameters do not stay whole.
    """

    def __init__(self, objective: nn.Module, groups: Groups, micro_batch_size: int, clip: float) -> None:
        from accelerate import Accelerator
        from accelerate.utils import is_deepspeed_available

        if not is_deepspeed_available():
            raise ConversionError("the launcher asks for DeepSpeed, which is not installed; pip install deepspeed")
        self.accelerator = Accelerator()
        plugin: Any = self.accelerator.state.deepspeed_plugin
        if plugin.zero_stage == 3:
            raise ConversionError("zero_stage: 3 is not supported; use 2, or recipes/accelerate/fsdp2.yaml for shards")
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = micro_batch_size
        plugin.deepspeed_config["gradient_clipping"] = clip
        plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
        self.named = {n: p for group in groups for n, p in group["params"].items()}
        self.device = self.accelerator.device
        self.objective, self.optimizer = self.accelerator.prepare(objective, adamw(groups))
        self._last = True

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)  # takes the step too, after the last micro-batch

    def step(self, clip: float, loss: torch.Tensor) -> torch.Tensor:
        norm = self.objective.get_global_grad_norm()  # type: ignore[operator]
        return torch.as_tensor(0.0 if norm is None else norm)

    def moments(self) -> Moments:
        from deepspeed.utils import safe_get_full_optimizer_state

        found: Moments = {}
        for name, tensor in self.named.items():
            state = {key: safe_get_full_optimizer_state(tensor, key) for key in ("exp_avg", "exp_avg_sq")}
            found[name] = {key: value for key, value in state.items() if value is not None}
        return found

    def load_moments(self, moments: Moments) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        for name, saved in moments.items():
            for key in ("exp_avg", "exp_avg_sq"):
                safe_set_full_optimizer_state(self.named[name], saved[key], key)
