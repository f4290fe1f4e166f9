"""One token of linear attention on the GPU, in one launch: the state is read once and written once.

Bound: 8·K·V bytes per sequence and head over the memory bandwidth; everything else is small beside the state.
"""

# ruff: noqa: SIM108  (branches on compile-time constants read and compile best as statements)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linearize.kernels.dispatch import on_device
from linearize.kernels.linear_attention import launch as table


@triton.jit
def _step(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    u_ptr,
    state_ptr,
    o_ptr,
    H,
    scale,
    q_b,
    q_h,
    q_k,
    k_b,
    k_h,
    k_k,
    v_b,
    v_h,
    v_v,
    g_b,
    g_h,
    g_k,
    s_b,
    s_h,
    s_k,
    s_v,
    K: tl.constexpr,
    V: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    DECAY: tl.constexpr,
    BONUS: tl.constexpr,
):
    """V_BLOCK columns of one head's state and output. DECAY: 0 none, 1 per head, 2 per key channel."""
    EVEN: tl.constexpr = (K == K_BLOCK) and (V % V_BLOCK == 0)
    blocks: tl.constexpr = (V + V_BLOCK - 1) // V_BLOCK
    block = tl.program_id(0) % blocks
    bh = tl.program_id(0) // blocks
    b = (bh // H).to(tl.int64)
    h = bh % H
    ik = tl.arange(0, K_BLOCK)
    iv = block * V_BLOCK + tl.arange(0, V_BLOCK)
    k_ok = ik < K
    v_ok = iv < V
    spot = state_ptr + b * s_b + h * s_h + ik[:, None] * s_k + iv[None, :] * s_v
    if EVEN:
        state = tl.load(spot)
    else:
        state = tl.load(spot, mask=k_ok[:, None] & v_ok[None, :], other=0.0)
    q = tl.load(q_ptr + b * q_b + h * q_h + ik * q_k, mask=k_ok, other=0.0).to(tl.float32) * scale
    k = tl.load(k_ptr + b * k_b + h * k_h + ik * k_k, mask=k_ok, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + b * v_b + h * v_h + iv * v_v, mask=v_ok, other=0.0).to(tl.float32)
    update = k[:, None] * v[None, :]
    if BONUS:
        u = tl.load(u_ptr + h * K + ik, mask=k_ok, other=0.0)
        seen = state + u[:, None] * update
    if DECAY == 1:
        state = state * tl.exp(tl.load(g_ptr + b * g_b + h * g_h).to(tl.float32))
    if DECAY == 2:
        g = tl.load(g_ptr + b * g_b + h * g_h + ik * g_k, mask=k_ok, other=0.0).to(tl.float32)
        state = state * tl.exp(g)[:, None]
    state += update
    if not BONUS:
        seen = state
    o = tl.sum(q[:, None] * seen, 0)
    if EVEN:
        tl.store(spot, state)
    else:
        tl.store(spot, state, mask=k_ok[:, None] & v_ok[None, :])
    tl.store(o_ptr + (b * H + h) * V + iv, o.to(o_ptr.dtype.element_ty), mask=v_ok)


@torch.library.custom_op(
    "linearize::linear_attention_step",
    mutates_args=("state",),
    schema="(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor? g, Tensor? bonus, float scale) -> Tensor",
)
def _step_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    g: Tensor | None,
    bonus: Tensor | None,
    scale: float,
) -> Tensor:
    return _launch(q, k, v, state, g, bonus, scale)


@_step_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    g: Tensor | None,
    bonus: Tensor | None,
    scale: float,
) -> Tensor:
    return v.new_empty(v.shape)


def step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    state_BHKV: Tensor,
    log_decay: Tensor | None,
    bonus_HK: Tensor | None,
    scale: float,
) -> Tensor:
    """Arguments as `linear_attention_step`, already checked. A custom operator only to torch.compile."""
    run = _step_op if torch.compiler.is_compiling() else _launch
    return run(q_BHK, k_BHK, v_BHV, state_BHKV, log_decay, bonus_HK, scale)


def _launch(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    state_BHKV: Tensor,
    log_decay: Tensor | None,
    bonus_HK: Tensor | None,
    scale: float,
) -> Tensor:
    (B, H, K), V = q_BHK.shape, v_BHV.shape[2]
    o = torch.empty(B, H, V, dtype=v_BHV.dtype, device=v_BHV.device)
    launch = table.step_launch(K, V)
    programs = B * H * -(-V // launch.block)
    if programs == 0:
        return o
    g_strides: tuple[int, ...] = (0, 0, 0)
    if log_decay is None:
        pass
    elif log_decay.dim() == 1:
        g_strides = (0, log_decay.stride(0), 0)
    else:
        g_strides = (*log_decay.stride(), 0)[:3]
    with on_device(q_BHK):
        _step[(programs,)](
            q_BHK,
            k_BHK,
            v_BHV,
            log_decay,
            None if bonus_HK is None else bonus_HK.contiguous(),
            state_BHKV,
            o,
            H,
            scale,
            *q_BHK.stride(),
            *k_BHK.stride(),
            *v_BHV.stride(),
            *g_strides,
            *state_BHKV.stride(),
            K=K,
            V=V,
            K_BLOCK=triton.next_power_of_2(K),
            V_BLOCK=launch.block,
            DECAY=0 if log_decay is None else 2 if log_decay.dim() == 3 else 1,
            BONUS=bonus_HK is not None,
            num_warps=launch.warps,
            num_stages=1,
        )
    return o
