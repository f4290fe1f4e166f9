"""The join as its formula has it, in plain torch; differentiated by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def branch_join_reference(
    y_BTHV: Tensor, window_BTHV: Tensor, logit_BTH: Tensor, scale_HV: Tensor, window_part_HV: Tensor
) -> Tensor:
    """[B,T,H,V] in the window's dtype."""
    wide = torch.promote_types(torch.float32, torch.promote_types(y_BTHV.dtype, window_BTHV.dtype))
    # exp(logsigmoid(x)): the derivative of torch.sigmoid, σ (1 − σ), loses its digits where σ is nearly 1.
    window, share = window_BTHV.to(wide), torch.exp(F.logsigmoid(logit_BTH.to(wide)))[..., None]
    change = torch.addcmul(scale_HV * y_BTHV, window_part_HV, window, value=-1)
    return torch.addcmul(window, share, change).to(window_BTHV.dtype)
