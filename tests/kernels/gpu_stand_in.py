"""A GPU that is not there: Triton compiles for it, launches nothing, and says what each kernel takes of it.

Run as a program, with a compute capability, the shared memory of a block in bytes, one of `CASES` and the heads' width;
prints JSON.
Outputs hold whatever memory held. Triton must not have been told to interpret.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from linearize import kernels
from linearize.kernels import checks, dispatch


class StandIn:
    """A driver for `driver.set_active`."""

    def __init__(self, capability: int, shared_memory: int) -> None:
        self.capability, self.shared_memory = capability, shared_memory
        self.launches: list[tuple[str, int, int]] = []
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_, **__: self.launches.append((metadata.name, metadata.shared, metadata.num_stages))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared_memory, "multiprocessor_count": 64, "warpSize": 32, "max_num_regs": 65536}

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 0, 0, 64, 0, 1024

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def stand_in(capability: int, shared_memory: int) -> StandIn:
    """Let kernels on CPU tensors compile for a GPU from now on, for as long as the process lives."""
    device = StandIn(capability, shared_memory)
    driver.set_active(device)
    for module in pkgutil.walk_packages(kernels.__path__, "linearize.kernels."):
        if ".bench" not in module.name:
            importlib.import_module(module.name)
    nothing: Any = lambda *_: None  # noqa: E731
    for module in [m for name, m in sys.modules.items() if name.startswith("linearize.kernels")]:
        for name, old in (
            ("why_no_triton", dispatch.why_no_triton),
            ("check_log_decay_sign", checks.check_log_decay_sign),
        ):
            if getattr(module, name, None) is old:
                setattr(module, name, nothing)
    return device


def _heads(*shape: int) -> Tensor:
    return torch.randn(2, 150, 2, *shape, dtype=torch.bfloat16, requires_grad=True)


def _linear_attention(width: int) -> Tensor:
    from linearize.kernels.linear_attention import linear_attention

    decay = -torch.rand(2, 150, 2, width)
    return linear_attention(*(_heads(width) for _ in range(3)), decay.requires_grad_(), backend="triton")[0]


def _delta_rule(width: int) -> Tensor:
    from linearize.kernels.delta_rule import delta_rule

    return delta_rule(*(_heads(width) for _ in range(3)), _heads(), backend="triton")[0]


def _window_attention(width: int) -> Tensor:
    from linearize.kernels.window_attention import window_attention

    found = window_attention(*(_heads(width) for _ in range(3)), window=64, backend="triton")
    assert isinstance(found, Tensor)
    return found


def _rat_attention(width: int) -> Tensor:
    from linearize.kernels.rat_attention import rat_attention

    gate = torch.rand(2, 150, 2, width).requires_grad_()
    return rat_attention(*(_heads(width) for _ in range(3)), gate, chunk_size=16, backend="triton")[0]


CASES = {
    "linear_attention": _linear_attention,
    "delta_rule": _delta_rule,
    "window_attention": _window_attention,
    "rat_attention": _rat_attention,
}

if __name__ == "__main__":
    gpu = stand_in(int(sys.argv[1]), int(sys.argv[2]))
    CASES[sys.argv[3]](int(sys.argv[4])).float().sum().backward()
    print(json.dumps(gpu.launches))
