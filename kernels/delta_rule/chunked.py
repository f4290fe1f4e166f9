"""The delta rule in chunks, in plain torch: the CPU path, differentiable in every input.

Written with its errors r_t = v_t − (A_t S_{t-1})ᵀ k_t, the delta rule is linear attention on the values β_t r_t:
S_t = A_t S_{t-1} + k_t (β_t r_t)ᵀ. Inside a chunk the errors solve a triangular system, so with G the
cumulative log decay in the chunk and S the state before it

    A_ij = Σ_d k_id k_jd e^{G_id − G_jd}  (j < i)        M = (I + A diag(β))⁻¹
    U = M V,  W = M (K ⊙ e^G),  R = U − W S,             then linear attention on diag(β) R

(the same as T = (I + diag(β) A)⁻¹ of the literature, since T diag(β) = diag(β) M; this form never divides
by β). The decays are linear attention's: no exponent above 0 is ever taken.

Shape suffixes: B batch, T time, H heads, K key width, V value width, M = B·H·N all chunks, N chunks in a
sequence, C chunk length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.kernels.linear_attention.chunked import (
    MAX_CHUNK,
    _between_halves,
    _scalar_decays,
    _scalar_to_chunks,
    _to_chunks,
    _VectorScores,
)
from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.packing import gather_group, group_by_length


def delta_rule_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `delta_rule_reference`, computed in chunks of up to 64."""
    B, T, H, K = q_BTHK.shape
    V = v_BTHV.shape[-1]
    dtype = compute_dtype(q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay, initial_state)
    scale = K**-0.5 if scale is None else scale
    if cu_seqlens is not None:
        return _packed(q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay, scale, initial_state, cu_seqlens, dtype)
    if T == 0 or B == 0 or H == 0:
        state = q_BTHK.new_zeros(B, H, K, V, dtype=dtype) if initial_state is None else initial_state.to(dtype)
        return v_BTHV.clone(), state  # empty, but a part of v's graph

    C = min(MAX_CHUNK, 1 << (T - 1).bit_length())
    q_MCK = _to_chunks(q_BTHK, C, dtype) * scale
    k_MCK = _to_chunks(k_BTHK, C, dtype)
    v_MCV = _to_chunks(v_BTHV, C, dtype)
    beta_MC = _scalar_to_chunks(beta_BTH, B, T, C, dtype)

    # Scores of queries and of keys against keys; q and k with the decay since the chunk's start, k to its end.
    diagonal_MC = (q_MCK * k_MCK).sum(-1)
    if log_decay is None:
        P_MCC = (q_MCK @ k_MCK.mT).tril()
        A_MCC = (k_MCK @ k_MCK.mT).tril(-1)
        q_start, k_start, k_end, total = q_MCK, k_MCK, k_MCK, None
    elif log_decay.dim() == 4:
        g_MCK = _to_chunks(log_decay, C, dtype)
        P_MCC, q_start, k_end, total = _VectorScores.apply(q_MCK, k_MCK, g_MCK, diagonal_MC, False)
        none_MC = torch.zeros_like(diagonal_MC)
        A_MCC, k_start, _, _ = _VectorScores.apply(k_MCK, k_MCK, g_MCK, none_MC, False)
    else:
        L_MCC, from_start_MC, to_end_MC, total = _scalar_decays(_scalar_to_chunks(log_decay, B, T, C, dtype), False)
        P_MCC = (q_MCK @ k_MCK.mT) * L_MCC + torch.diag_embed(diagonal_MC)
        A_MCC = (k_MCK @ k_MCK.mT) * L_MCC
        q_start, k_start = q_MCK * from_start_MC[..., None], k_MCK * from_start_MC[..., None]
        k_end = k_MCK * to_end_MC[..., None]
        total = total[:, None]

    M_MCC = _UnitLowerInverse.apply(A_MCC * beta_MC[:, None])
    W_MCK, U_MCV = M_MCC @ k_start, M_MCC @ v_MCV

    def split(x: Tensor) -> Tensor:
        return x.view(B * H, -1, *x.shape[1:])

    S0 = None if initial_state is None else initial_state.to(dtype).reshape(B * H, K, V)
    states, errors, final = _ErrorScan.apply(
        split(W_MCK),
        split(U_MCV),
        split(k_end * beta_MC[..., None]),
        None if total is None else split(total),
        S0,
    )
    o_MCV = torch.baddbmm((P_MCC * beta_MC[:, None]) @ errors.flatten(0, 1), q_start, states.flatten(0, 1))
    o_BHTV = o_MCV.view(B, H, -1, V)[:, :, :T]
    return o_BHTV.transpose(1, 2).to(v_BTHV.dtype), final.view(B, H, K, V)


class _UnitLowerInverse(torch.autograd.Function):
    """`(I + N)⁻¹` for strictly lower triangular N [M, C, C], C a power of two, by block doubling.

    With the inverses of all diagonal blocks of width h known, those of width 2h need one corner:
    [[a, 0], [n, b]]⁻¹ = [[a⁻¹, 0], [−b⁻¹ n a⁻¹, b⁻¹]].
    """

    @staticmethod
    def forward(ctx: Any, N_MCC: Tensor) -> Tensor:
        M, C, _ = N_MCC.shape
        inverse = torch.zeros_like(N_MCC, memory_format=torch.contiguous_format)
        inverse.diagonal(dim1=1, dim2=2).fill_(1)
        N_MCC = N_MCC.contiguous()
        h = 1
        while h < C:
            corner = _between_halves(N_MCC, h)
            if h > 1:
                blocks = _diagonal_blocks(inverse, h).reshape(M, C // (2 * h), 2, h, h)
                corner = blocks[:, :, 1] @ corner @ blocks[:, :, 0]
            _between_halves(inverse, h).copy_(corner.neg())
            h *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, dinverse: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ dinverse @ inverse.mT).tril(-1)


def _diagonal_blocks(x_MCC: Tensor, h: int) -> Tensor:
    """The [M, C/h, h, h] blocks on the diagonal."""
    return x_MCC.unflatten(1, (-1, h)).unflatten(3, (-1, h)).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


class _ErrorScan(torch.autograd.Function):
    """`R_n = U_n − W_n S_n`, `S_{n+1} = total_n ⊙ S_n + E_nᵀ R_n` over the chunks.

    W, E [BH,N,C,K], U [BH,N,C,V], total [BH,N,K] or [BH,N,1] or None, initial state [BH,K,V] or None.
    Returns the state before each chunk, the errors R and the last state.
    """

    @staticmethod
    def forward(
        ctx: Any, W: Tensor, U: Tensor, E: Tensor, total: Tensor | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        BH, N, _C, K = W.shape
        V = U.shape[-1]
        states = U.new_empty(BH, N, K, V)
        errors = torch.empty_like(U, memory_format=torch.contiguous_format)
        state = U.new_zeros(BH, K, V) if initial is None else initial
        for n in range(N):
            states[:, n] = state
            r = torch.baddbmm(U[:, n], W[:, n], state, alpha=-1)
            errors[:, n] = r
            carried = state if total is None else state * total[:, n, :, None]
            state = torch.baddbmm(carried, E[:, n].mT, r)
        ctx.save_for_backward(W, E, total, states, errors)
        ctx.has_initial = initial is not None
        return states, errors, state

    @staticmethod
    def backward(ctx: Any, dstates: Tensor, derrors: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        W, E, total, states, errors = ctx.saved_tensors
        after = torch.empty_like(states)  # the gradient of the state after each chunk
        dU = torch.empty_like(errors)
        for n in reversed(range(states.shape[1])):
            after[:, n] = dstate
            dr = torch.baddbmm(derrors[:, n], E[:, n], dstate)
            dU[:, n] = dr
            carried = dstate if total is None else dstate * total[:, n, :, None]
            dstate = torch.baddbmm(carried, W[:, n].mT, dr, alpha=-1).add_(dstates[:, n])
        dW = -(dU @ states.mT)
        dE = errors @ after.mT
        dtotal = None
        if total is not None:
            dtotal = (states * after).sum(-1)
            dtotal = dtotal if total.shape[-1] > 1 else dtotal.sum(-1, keepdim=True)
        return dW, dU, dE, dtotal, dstate if ctx.has_initial else None


def _packed(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Sequences laid end to end: similar lengths go together as one padded batch."""
    N, (_, T, H, K), V = cu_seqlens.numel() - 1, q_BTHK.shape, v_BTHV.shape[-1]
    o_THV = v_BTHV[0] if T == 0 else v_BTHV.new_zeros(T, H, V)
    final = q_BTHK.new_zeros(N, H, K, V, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    for group in group_by_length(cu_seqlens):
        o, state = delta_rule_chunked(
            gather_group(q_BTHK, group),
            gather_group(k_BTHK, group),
            gather_group(v_BTHV, group),
            gather_group(beta_BTH, group),
            None if log_decay is None else gather_group(log_decay, group),
            scale=scale,
            initial_state=None if initial_state is None else final[group.sequences],
        )
        o_THV = o_THV.index_put((group.index[group.valid],), o[group.valid])
        final = final.index_copy(0, group.sequences, state)
    return o_THV[None], final
