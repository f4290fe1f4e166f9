"""What a loss from hidden states adds up, and how logits are made of the head's products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """`ce_weight · CE + kl_weight · KL` of logits `softcap · tanh(scale · product / softcap)`; softcap 0 is none."""

    ce_weight: float
    kl_weight: float
    reverse: bool
    temperature: float
    scale: float
    softcap: float
    ignore_index: int

    def logits(self, product: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of a head's products in float32 (or float64), and d logit / d product, None where it is 1."""
        z = product.to(wide_dtype(product.dtype))
        if self.softcap:
            bent = torch.tanh(z * (self.scale / self.softcap))
            return self.softcap * bent, self.scale * (1 - bent.square())
        if self.scale != 1:
            return z * self.scale, torch.full((), self.scale, dtype=z.dtype, device=z.device)
        return z, None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What losses are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
