"""Find launch configurations for the gated scan on this GPU: each candidate is checked, then timed.

    python -m linearize.kernels.gated_scan.tune

Prints a line per candidate and shape (forward alone, or forward and backward), to be written into `launch.py`.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from linearize.kernels import bench
from linearize.kernels.bench.scan import SHAPES
from linearize.kernels.gated_scan import gated_scan
from linearize.kernels.gated_scan.launch import TABLE, Launch

CANDIDATES = [Launch(512, 2), Launch(512, 4), Launch(1024, 4), Launch(2048, 4), Launch(2048, 8)]


def check(inner: tuple[int, ...], chunk: int | None) -> float:
    """Worst relative error of the output and the gradients against float64."""
    x = torch.randn(2, 1000, *inner, device=bench.DEVICE, dtype=torch.bfloat16)
    gate, dy = torch.sigmoid(torch.randn_like(x) + 2), torch.randn_like(x)
    results: list[list[Tensor]] = []
    for double, backend in ((False, "triton"), (True, "chunked")):
        leaves = [(t.double() if double else t).detach().requires_grad_() for t in (x, gate)]
        y, _ = gated_scan(leaves[0], leaves[1], chunk, backend=backend)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(*results, strict=True))


def main() -> None:
    for B, T, inner, chunk in SHAPES:
        x = torch.randn(B, T, *inner, device=bench.DEVICE, dtype=torch.bfloat16)
        gate = torch.sigmoid(torch.randn_like(x) + 2)
        for kernel in TABLE:
            for pick in CANDIDATES:
                with mock.patch.dict(TABLE, {kernel: pick}):
                    wrong = check(inner, chunk)
                    forward, both, _, _ = bench.forward_and_both(
                        lambda x, g, chunk=chunk: gated_scan(x, g, chunk)[0], [x, gate], repeats=5
                    )
                shape = f"{kernel:8} B{B} T{T} D{'x'.join(map(str, inner))} chunk {chunk}"
                print(f"{shape:42} {pick}  {forward:.4f} / {both:.4f} ms  error {wrong:.1e}", flush=True)


if __name__ == "__main__":
    main()
