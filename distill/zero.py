"""Training under DeepSpeed: ZeRO 1 and 2 through accelerate. Parameters stay whole in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from linearize.convert.errors import ConversionError
from linearize.distill import processes
from linearize.distill.placement import Groups, Placement, adamw
from linearize.distill.training_state import Moments

_PARTS = ("exp_avg", "exp_avg_sq")


class Zero(Placement):
    """Gradients and moments in pieces; DeepSpeed averages, clips and steps.

    Raises:
        ConversionError: DeepSpeed is not installed, or the stage is 3, whose parameters do not stay whole.
    """

    def __init__(
        self, objective: nn.Module, groups: Groups, micro_batch_size: int, accumulation: int, clip: float
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import is_deepspeed_available

        if not is_deepspeed_available():
            raise ConversionError("the launcher asks for DeepSpeed, which is not installed; pip install deepspeed")
        self.accelerator = Accelerator()
        plugin: Any = self.accelerator.state.deepspeed_plugin
        if plugin.zero_stage == 3:
            raise ConversionError("zero_stage: 3 is not supported; use 2, or recipes/accelerate/fsdp2.yaml for shards")
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "train_batch_size": micro_batch_size * accumulation * processes.count(),
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip,
            "zero_allow_untested_optimizer": True,
        }
        self.named = {n: p for group in groups for n, p in group["params"].items()}
        self.device = self.accelerator.device
        self.accumulation = accumulation
        self.objective, self.optimizer = self.accelerator.prepare(objective, adamw(groups))

    def backward(self, loss: torch.Tensor) -> None:
        """DeepSpeed divides by the number of micro-batches, whose weights are in the losses. It counts them, and updates
        after the last one."""
        engine: Any = self.objective  # accelerate's own backward would take every micro-batch for the last
        engine.backward(loss * self.accumulation)
        engine.step()

    def step(self, clip: float, loss: torch.Tensor) -> torch.Tensor:
        norm = self.objective.get_global_grad_norm()  # type: ignore[operator]
        return torch.as_tensor(0.0 if norm is None else norm)

    def moments(self) -> Moments:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        step = self._states()[0]["step"]
        found: Moments = {}
        for name, tensor in self.named.items():
            found[name] = {key: safe_get_full_optimizer_state(tensor, key) for key in _PARTS}
            found[name]["step"] = step.clone()
        return found

    def load_moments(self, moments: Moments) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if not moments:
            return
        step = next(iter(moments.values()))["step"]
        for partition, state in zip(self._partitions(), self._states(), strict=True):
            state |= {"step": step.clone(), **{key: torch.zeros_like(partition) for key in _PARTS}}
        self._link()
        for name, saved in moments.items():
            for key in _PARTS:
                safe_set_full_optimizer_state(self.named[name], saved[key].to(self.device), key)

    def _partitions(self) -> list[torch.Tensor]:
        """This process's part of every group, flat."""
        zero: Any = self.objective.optimizer
        return list(zero.single_partition_of_fp32_groups)

    def _states(self) -> list[dict[str, Any]]:
        """AdamW's state of every part."""
        zero: Any = self.objective.optimizer
        return [zero.optimizer.state[partition] for partition in self._partitions()]

    def _link(self) -> None:
        """Tell tensors where their moments lie. DeepSpeed (0.19) does it after the first group's first step, when the
        other groups have none."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        zero: Any = self.objective.optimizer
        for tensors, partition in zip(zero.bit16_groups, self._partitions(), strict=True):
            lazy_init_hp_params_optimizer_state(tensors, partition, zero.optimizer.state)
        zero._hp_optimizer_states_linked = True
