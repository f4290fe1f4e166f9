"""What the launching code of the linear attention kernels shares."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.dispatch import triton_interpreted
from linearize.kernels.linear_attention.launch import CHUNK


def operand_dtype(*tensors: Tensor) -> torch.dtype:
    """What matrix products read: the inputs' dtype where they agree, float32 where they don't."""
    dtype = tensors[0].dtype
    return dtype if all(t.dtype == dtype for t in tensors) else torch.float32


def dot_precision(dtype: torch.dtype) -> str:
    """Of products of float32 tiles. 16-bit tiles are multiplied exactly whatever it says.

    With float16 inputs only products that need float32's range are made in it, and tf32 alone, which truncates, would
    lose more than float16 does.
    """
    return {torch.float32: "ieee", torch.float16: "tf32x3"}.get(dtype, "tf32")


def wide_dtype(dtype: torch.dtype) -> tl.dtype:
    """For products of factors up to e^60: bfloat16 has the range, float16 needs tf32."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def last_dense(x: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class Packing:
    """Where sequences and their chunks lie; no value is read by the host."""

    def __init__(self, B: int, T: int, cu_seqlens: Tensor | None) -> None:
        self.T = T
        self.varlen = cu_seqlens is not None
        if cu_seqlens is None:
            self.sequences = B
            self.chunks = B * triton.cdiv(T, CHUNK)
            self.cu = self.cu_chunks = None
        else:
            self.sequences = cu_seqlens.numel() - 1
            self.chunks = triton.cdiv(T, CHUNK) + self.sequences  # at most: one part chunk more for each sequence
            self.cu = cu_seqlens.to(torch.int32)
            lengths = self.cu[1:] - self.cu[:-1]
            self.cu_chunks = torch.nn.functional.pad(
                ((lengths + CHUNK - 1) // CHUNK).cumsum(0, dtype=torch.int32), (1, 0)
            )

    @property
    def even(self) -> bool:
        """Whether every chunk is full, for certain."""
        return not self.varlen and self.T % CHUNK == 0


def piece_dtype() -> tl.dtype:
    """What `sum_rows` splits numbers into; the interpreter has no bfloat16 products."""
    return tl.float32 if triton_interpreted() else tl.bfloat16


def per_channel(g: Tensor | None, q: Tensor) -> Tensor:
    """Any log decay as a [B,T,H,K] view."""
    if g is None:
        return q.new_zeros(1, 1, 1, 1, dtype=torch.float32).expand(q.shape)
    return (g if g.dim() == 4 else g[..., None]).expand(q.shape)
