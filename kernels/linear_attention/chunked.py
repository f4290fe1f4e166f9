"""Linear attention in chunks, in plain torch: the CPU path, differentiable in every input.

Inside a chunk the scores are a masked matrix; across chunks a short loop carries the state:

    o_i    = (q_i ⊙ e^{G_i}) S_prev  +  Σ_{j≤i} A_ij v_j        A_ij = Σ_d q_id k_jd e^{G_id − G_jd}
    S_next = e^{G_C} ⊙ S_prev        +  Σ_j (k_j ⊙ e^{G_C − G_j}) v_jᵀ

with G the cumulative log decay in the chunk. e^{−G_j} alone would overflow, and differences of long
cumulative sums lose digits, so neither is ever formed. With one decay per token (`_scalar_decays`) the sums
between j and i are taken directly. With one per channel (`_VectorScores`) a chunk is halved recursively:
between the two halves of a block every pair passes the middle, so its decay is the product of two
factors ≤ 1, one on the query's side and one on the key's.

Shape suffixes: B batch, T time, H heads, K key width, V value width, M = B·H·N all chunks, N chunks in a
sequence, C chunk length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linearize.kernels.linear_attention.reference import compute_dtype
from linearize.kernels.packing import gather_group, group_by_length

MAX_CHUNK = 64
# Decays below this are taken as 0, which keeps their products out of the slow denormal range.
_SMALLEST_DECAY = 1e-30


def linear_attention_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay: Tensor | None = None,
    *,
    bonus_HK: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `linear_attention_reference`, computed in chunks of up to 64."""
    B, T, H, K = q_BTHK.shape
    V = v_BTHV.shape[-1]
    dtype = compute_dtype(q_BTHK, k_BTHK, v_BTHV, log_decay, initial_state)
    scale = K**-0.5 if scale is None else scale
    if cu_seqlens is not None:
        return _packed(q_BTHK, k_BTHK, v_BTHV, log_decay, bonus_HK, scale, initial_state, cu_seqlens, dtype)
    if T == 0 or B == 0 or H == 0:
        state = q_BTHK.new_zeros(B, H, K, V, dtype=dtype) if initial_state is None else initial_state.to(dtype)
        return v_BTHV.clone(), state  # empty, but a part of v's graph
    if T == 1:
        return _single_token(q_BTHK, k_BTHK, v_BTHV, log_decay, bonus_HK, scale, initial_state, dtype)

    C = min(MAX_CHUNK, 1 << (T - 1).bit_length())
    q_MCK = _to_chunks(q_BTHK, C, dtype) * scale
    k_MCK = _to_chunks(k_BTHK, C, dtype)
    v_MCV = _to_chunks(v_BTHV, C, dtype)
    if bonus_HK is None:
        diagonal_MC = (q_MCK * k_MCK).sum(-1)
    else:
        u_H1K = bonus_HK.to(dtype)[:, None]
        diagonal_MC = ((q_MCK.view(B, H, -1, K) * u_H1K).view_as(q_MCK) * k_MCK).sum(-1)

    # The scores, and q and k carrying the decay from the chunk's start and to its end.
    exclusive = bonus_HK is not None  # with a bonus the query sees the state before its own step's decay
    if log_decay is None:
        A_MCC = (q_MCK @ k_MCK.mT).tril(-1) + torch.diag_embed(diagonal_MC)
        q_start_MCK, k_end_MCK, total = q_MCK, k_MCK, None
    elif log_decay.dim() == 4:
        g_MCK = _to_chunks(log_decay, C, dtype)
        A_MCC, q_start_MCK, k_end_MCK, total = _VectorScores.apply(q_MCK, k_MCK, g_MCK, diagonal_MC, exclusive)
    else:
        g_MC = _scalar_to_chunks(log_decay, B, T, C, dtype)
        L_MCC, from_start_MC, to_end_MC, total = _scalar_decays(g_MC, exclusive)
        A_MCC = (q_MCK @ k_MCK.mT) * L_MCC + torch.diag_embed(diagonal_MC)
        q_start_MCK, k_end_MCK = q_MCK * from_start_MC[..., None], k_MCK * to_end_MC[..., None]
        total = total[:, None]

    update_MKV = k_end_MCK.mT @ v_MCV
    S0 = None if initial_state is None else initial_state.to(dtype).reshape(B * H, K, V)
    update = update_MKV.view(B * H, -1, K, V)
    states, final = _StateScan.apply(update, None if total is None else total.view(B * H, update.shape[1], -1), S0)
    o_MCV = torch.baddbmm(A_MCC @ v_MCV, q_start_MCK, states.view(-1, K, V))
    o_BHTV = o_MCV.view(B, H, -1, V)[:, :, :T]
    return o_BHTV.transpose(1, 2).to(v_BTHV.dtype), final.view(B, H, K, V)


def _to_chunks(x_BTHD: Tensor, C: int, dtype: torch.dtype) -> Tensor:
    """[B,T,H,D] to contiguous [B·H·N, C, D]; zeros after the end leave state and outputs as they are."""
    T, D = x_BTHD.shape[1], x_BTHD.shape[3]
    x_BHTD = x_BTHD.to(dtype).transpose(1, 2)
    if T % C:
        x_BHTD = F.pad(x_BHTD, (0, 0, 0, -T % C))
    return x_BHTD.reshape(-1, C, D).contiguous()  # the reshape may be a view with gaps


def _scalar_to_chunks(log_decay: Tensor, B: int, T: int, C: int, dtype: torch.dtype) -> Tensor:
    """[H] or [B,T,H] to [B·H·N, C]."""
    g_BTH = log_decay.to(dtype)
    if g_BTH.dim() == 1:
        g_BTH = g_BTH.expand(B, T, -1)
    return _to_chunks(g_BTH[..., None], C, dtype)[..., 0]


def _scalar_decays(g_MC: Tensor, exclusive: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decays of a chunk: between all pairs j < i, from its start to i, from j to its end, over all of it."""
    C = g_MC.shape[-1]
    # sums_ij = Σ_{j<m≤i} g_m: a masked cumulative sum, so that no difference of long sums is taken.
    below = torch.ones(C, C, dtype=torch.bool, device=g_MC.device).tril(-1)
    sums_MCC = g_MC[..., None].expand(-1, -1, C).masked_fill(~below, 0).cumsum(1)
    decays_MCC = sums_MCC.exp()
    to_end_MC = decays_MCC[:, -1]
    G_MC = g_MC.cumsum(-1)
    if exclusive:
        decays_MCC = F.pad(decays_MCC[:, :-1], (0, 0, 1, 0))
        from_start_MC = F.pad(G_MC[:, :-1], (1, 0)).exp()
    else:
        from_start_MC = G_MC.exp()
    return decays_MCC.tril(-1), from_start_MC, to_end_MC, G_MC[:, -1].exp()


class _VectorScores(torch.autograd.Function):
    """Scores of a chunk under a decay per channel, by recursive halving.

    In blocks of 2h positions, queries of the right half meet keys of the left half. Level by level, `q`
    gains the decay from the start of its block and `k` the decay to the end of its block, so each level is
    one batched product:

        level h   A[right, left] = q[right] k[left]ᵀ
                  q[right] *= decay over the left half;   k[left] *= decay over the right half

    and after the last level they carry the decay from the start and to the end of the chunk. Log decays are
    summed within blocks and exponentiated per block: two exponentials per element, each of a number ≤ 0.
    """

    @staticmethod
    def forward(
        ctx: Any, q_MCK: Tensor, k_MCK: Tensor, g_MCK: Tensor, diagonal_MC: Tensor, exclusive: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        M, C, K = q_MCK.shape
        A_MCC = q_MCK.new_zeros(M, C, C)
        A_MCC.diagonal(dim1=1, dim2=2).copy_(diagonal_MC)
        q, k, sums, decay = _leaves(q_MCK, k_MCK, g_MCK, exclusive)
        h = 1
        while h < C:
            q_right, k_left, decay_left, decay_right = _halves(q, k, decay, h)
            _between_halves(A_MCC, h).copy_(_products(q_right, k_left).view(M, -1, h, h))
            q_right.mul_(decay_left)
            k_left.mul_(decay_right)
            sums, decay = _join(sums, h)
            h *= 2
        ctx.save_for_backward(q_MCK, k_MCK, g_MCK)
        ctx.exclusive = exclusive
        return A_MCC, q, k, decay.view(M, K)

    @staticmethod
    def backward(ctx: Any, dA_MCC: Tensor, dq: Tensor, dk: Tensor, dtotal_MK: Tensor) -> tuple[Tensor | None, ...]:
        q_MCK, k_MCK, g_MCK = ctx.saved_tensors
        M, C, K = q_MCK.shape
        q, k, sums, decay = _leaves(q_MCK, k_MCK, g_MCK, ctx.exclusive)
        levels = []
        h = 1
        while h < C:
            q_right, k_left, decay_left, decay_right = _halves(q, k, decay, h)
            levels.append((h, q_right.clone(), k_left.clone(), decay_left, decay_right))
            q_right.mul_(decay_left)
            k_left.mul_(decay_right)
            sums, decay = _join(sums, h)
            h *= 2

        dq, dk = (x.clone(memory_format=torch.contiguous_format) for x in (dq, dk))
        dsums = (dtotal_MK * decay.view(M, K)).view(M, 1, K)  # gradient of each block's summed log decay
        for h, q_right, k_left, decay_left, decay_right in reversed(levels):
            dq_right, dk_left = dq.view(-1, 2, h, K)[:, 1], dk.view(-1, 2, h, K)[:, 0]
            dq_right.mul_(decay_left)
            dk_left.mul_(decay_right)
            dsums = dsums.view(-1, 1, K).expand(-1, 2, K).clone()
            dsums[:, 0] += (dq_right * q_right).sum(1)
            dsums[:, 1] += (dk_left * k_left).sum(1)
            dA = _between_halves(dA_MCC, h).reshape(-1, h, h)
            dq_right.add_(_outer(dA, k_left))
            dk_left.add_(_outer(dA.mT, q_right))
        dg = dsums.view(M, C, K)
        if not ctx.exclusive:
            dq *= g_MCK.exp()
            dg = dg.addcmul_(dq, q_MCK)
        return dq, dk, dg, dA_MCC.diagonal(dim1=1, dim2=2), None


def _leaves(q_MCK: Tensor, k_MCK: Tensor, g_MCK: Tensor, exclusive: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks of one position: the query carries its own step's decay (unless exclusive), the key none."""
    decay = g_MCK.exp()
    q = q_MCK.clone() if exclusive else q_MCK * decay
    return q, k_MCK.clone(), g_MCK, torch.threshold_(decay, _SMALLEST_DECAY, 0.0)


def _halves(q: Tensor, k: Tensor, decay: Tensor, h: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    K = q.shape[-1]
    decays = decay.view(-1, 2, 1, K)
    return q.view(-1, 2, h, K)[:, 1], k.view(-1, 2, h, K)[:, 0], decays[:, 0], decays[:, 1]


def _join(sums: Tensor, h: int) -> tuple[Tensor, Tensor]:
    sums = sums.reshape(-1, 2, sums.shape[-1]).sum(1)
    return sums, torch.threshold_(sums.exp(), _SMALLEST_DECAY, 0.0)


def _between_halves(A_MCC: Tensor, h: int) -> Tensor:
    """The [M, C/2h, h, h] scores between right-half queries and left-half keys of each block of 2h."""
    blocks = A_MCC.unflatten(1, (-1, 2, h)).unflatten(4, (-1, 2, h))
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ for many small blocks [n, h, K]."""
    if q.shape[1] == 1:
        return (q * k).sum(-1, keepdim=True)
    return torch.bmm(q, k.mT)


def _outer(a: Tensor, x: Tensor) -> Tensor:
    """a x for many small blocks, a [n, h, h], x [n, h, K]."""
    if a.shape[1] == 1:
        return a * x
    return torch.bmm(a, x)


class _StateScan(torch.autograd.Function):
    """`S_{n+1} = total_n ⊙ S_n + update_n` over the chunks; returns the state before each chunk and the last.

    update [BH,N,K,V], total [BH,N,K] or [BH,N,1] or None, initial state [BH,K,V] or None.
    """

    @staticmethod
    def forward(ctx: Any, update: Tensor, total: Tensor | None, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        BH, N, K, V = update.shape
        states = update.new_empty(BH, N, K, V)
        state = update.new_zeros(BH, K, V) if initial is None else initial
        for n in range(N):
            states[:, n] = state
            carried = state if total is None else state * total[:, n, :, None]
            state = carried + update[:, n]
        ctx.save_for_backward(total, states)
        ctx.has_initial = initial is not None
        return states, state

    @staticmethod
    def backward(ctx: Any, dstates: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        total, states = ctx.saved_tensors
        dupdate = torch.empty_like(states)
        dtotal = None if total is None else torch.empty_like(total)
        for n in reversed(range(states.shape[1])):
            dupdate[:, n] = dstate
            if total is None or dtotal is None:
                dstate = dstate + dstates[:, n]
            else:
                per_channel = (states[:, n] * dstate).sum(-1)
                dtotal[:, n] = per_channel if total.shape[-1] > 1 else per_channel.sum(-1, keepdim=True)
                dstate = torch.addcmul(dstates[:, n], total[:, n, :, None], dstate)
        return dupdate, dtotal, dstate if ctx.has_initial else None


def _single_token(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay: Tensor | None,
    bonus_HK: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """T = 1, as in decoding through the differentiable interface."""
    B, _, H, _K = q_BTHK.shape
    V = v_BTHV.shape[-1]
    q_BHK, k_BHK, v_BHV = (x[:, 0].to(dtype) for x in (q_BTHK, k_BTHK, v_BTHV))
    state = k_BHK[..., None] * v_BHV[..., None, :]
    seen = None if bonus_HK is None else bonus_HK.to(dtype)[..., None] * state
    if initial_state is not None:
        before = initial_state.to(dtype)
        seen = None if seen is None else seen + before
        if log_decay is not None:
            g = log_decay.to(dtype)
            g = g.view(1, H, 1, 1) if g.dim() == 1 else g[:, 0].reshape(B, H, -1, 1)
            before = g.exp() * before
        state = state + before
    o_BHV = torch.matmul(q_BHK[:, :, None] * scale, state if seen is None else seen)
    return o_BHV.view(B, 1, H, V).to(v_BTHV.dtype), state


def _packed(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay: Tensor | None,
    bonus_HK: Tensor | None,
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
        g = log_decay if log_decay is None or log_decay.dim() == 1 else gather_group(log_decay, group)
        if g is not None and g.dim() == 1 and not group.full:  # padding must not decay the state
            g = gather_group(g.expand(1, T, H), group)
        o, state = linear_attention_chunked(
            gather_group(q_BTHK, group),
            gather_group(k_BTHK, group),
            gather_group(v_BTHV, group),
            g,
            bonus_HK=bonus_HK,
            scale=scale,
            initial_state=None if initial_state is None else final[group.sequences],
        )
        o_THV = o_THV.index_put((group.index[group.valid],), o[group.valid])
        final = final.index_copy(0, group.sequences, state)
    return o_THV[None], final
