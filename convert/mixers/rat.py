"""`rat`: gated running means inside chunks of the teacher's keys and values, softmax over the chunks' last means.

Source: RAT (arXiv 2507.04416). Inside a chunk of C tokens, per kv head and channel:

    g_t  = σ(W_g x_t + b),   z_t = σ(W_z x_t + b_z) / σ(b_z at the start)
    k̃_t = g_t ⊙ k̃_{t-1} + (1 - g_t) ⊙ k_t,   ṽ_t alike
    out  = W_o (z_t ⊙ Σ softmax(q_t · k̃ · scale + r) ṽ)

over the last (k̃, ṽ) of the chunks before the window and the exact (k, v) of the window, in one softmax (see
`kernels/rat_attention/windowed.py`); without a window over those of all earlier chunks and the running pair of the own. r is one number
per head, at summaries only.

Where this differs from the paper, a conversion starts closer to the teacher: a chunk's mean starts from its first
token instead of from zero, so that chunks of one token are the teacher itself whatever the gates; z starts at 1; W_g
and W_z are low-rank; positions are those of tokens, not of chunks. `start: zero` and `rank: 0` are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from pydantic import Field, field_validator
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.calibration import CalibrationSample
from linearize.convert.mixers.base import Mixer, MixerOptions, Rope, register
from linearize.convert.mixers.parts import LowRank
from linearize.convert.mixers.rat_cache import Grid, chunk_slots, ring_of, ring_size, slot_count, with_earlier
from linearize.kernels.gated_scan import gated_scan
from linearize.kernels.packing import gather_group, group_by_length
from linearize.kernels.rat_attention import rat_window_attention, rat_window_attention_step

OPEN = 2.0
"""Where the logit of the output gate starts."""
GATES = (0.8, 0.9, 0.95)
ALL_THE_WEIGHT = {"both": 0.0, "window": -1e4, "recurrence": 1e4}
"""Added to the summaries' logits to hear one branch alone; where there is no summary yet, the window speaks."""


class RATOptions(MixerOptions):
    """Options of `rat`."""

    window: int = Field(64, ge=0, description="exact keys beside the chunk summaries, in one softmax; 0 for none")
    chunk: int = Field(16, ge=1, description="tokens per summary, a power of two; 1 is softmax attention")
    gate: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="where the gates start, how much of the mean is kept per token; none: the best of 0.8, 0.9 and 0.95 "
        "for each kv head, uncalibrated 0.8",
    )
    rank: int = Field(16, ge=0, description="rank of the gates' projections; 0 for full ones, as in the paper")
    rope: Literal["token", "chunk"] = Field(
        "token", description="token: keys carry their own position; chunk: a summary has that of its last token"
    )
    start: Literal["token", "zero"] = Field(
        "token", description="what a chunk's mean starts from: its first token, or zero (the paper)"
    )

    @field_validator("chunk")
    @classmethod
    def _power_of_two(cls, chunk: int) -> int:
        if chunk & (chunk - 1):
            raise ValueError(f"chunk is {chunk}; it must be a power of two (1, 2, 4, ...)")
        return chunk


class GateProjection(nn.Module):
    """σ of a projection per head and channel, which starts as its bias. float32."""

    def __init__(self, spec: AttentionSpec, heads: int, rank: int, bias: float) -> None:
        super().__init__()
        if rank:
            self.projection: nn.Module = LowRank(spec.hidden_size, rank, heads, spec.head_dim, bias)
            return
        full = nn.Linear(spec.hidden_size, heads * spec.head_dim)
        nn.init.zeros_(full.weight)
        nn.init.constant_(full.bias, bias)
        self.projection = nn.Sequential(full, nn.Unflatten(-1, (heads, spec.head_dim)))

    @torch.no_grad()
    def start_at(self, gates: torch.Tensor) -> None:
        """Let each head's gates `[heads]` start there."""
        last = self.projection.up if isinstance(self.projection, LowRank) else self.projection.get_submodule("0")
        bias = cast(nn.Linear, last).bias
        bias.copy_(
            torch.logit(gates.float())[:, None].expand(len(gates), -1).repeat(1, len(bias) // len(gates)).flatten()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, T, D]` -> `[B, T, heads, K]` float32 in (0, 1)."""
        return torch.sigmoid(self.projection(x.float()))


class ChunkGates(nn.Module):
    """The gates of the means, the output gate, and the summaries' weight in the softmax. float32."""

    def __init__(self, spec: AttentionSpec, options: RATOptions) -> None:
        super().__init__()
        gate = options.gate or GATES[0]
        logit = math.log(gate / (1 - gate))
        self.keep = GateProjection(spec, spec.num_kv_heads, options.rank, logit)
        self.open = GateProjection(spec, spec.num_heads, options.rank, OPEN)
        self.summary_weight = nn.Parameter(torch.zeros(spec.num_heads))

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """z `[B, T, H, K]`."""
        return self.open(x) / torch.sigmoid(x.new_tensor(OPEN, dtype=torch.float32))


@register
class RAT(Mixer):
    """Softmax over gated running means of chunks beside exact keys of a window (RAT)."""

    name = "rat"
    Options = RATOptions
    options: RATOptions
    float32_modules = ("chunk_gates",)
    separable = True

    def __init__(self, spec: AttentionSpec, attention: nn.Module, layer_idx: int, options: RATOptions) -> None:
        super().__init__(spec, attention, layer_idx, options)
        self.chunk_gates = ChunkGates(spec, options)

    @property
    def window(self) -> int:
        """Exact keys: never more than the teacher's own window."""
        return min(self.options.window, self.spec.sliding_window or self.options.window)

    def set_chunk(self, chunk: int) -> None:
        """Go on with chunks of `chunk` tokens, a power of two; the model's configuration says so from now on.

        No tensor changes its shape. A cache filled before cannot be used after.
        """
        self.options = type(self.options)(**{**self.options.model_dump(), "chunk": chunk})
        layer = self.attention.config.linearize["layers"][self.layer_idx]
        if layer["mixer"] == self.name:
            layer["options"] = {**layer["options"], "chunk": chunk}
        else:  # inside a mixer of some heads, whose option `options` is this one's
            inner = {**layer["options"].get("options", {}), "chunk": chunk}
            layer["options"] = {**layer["options"], "options": inner}

    def mix(
        self,
        hidden_states: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State]:
        q, k, v = self.project(hidden_states)
        turned_q, turned_k = (x.to(v.dtype) for x in self.rotate(q, k, rope))
        with torch.autocast(hidden_states.device.type, enabled=False):
            gate = self.chunk_gates.keep(hidden_states)
            tensors = [turned_q, turned_k, k, v, gate]
            if rope is not None:
                tensors += [x.expand(len(q), -1, -1) for x in rope]
            if cu_seqlens is None:
                heads, new_state = self.attend_chunks(tensors, padding_mask, state)
            else:
                heads, new_state = self.packed(tensors, cu_seqlens), {}
            return heads * self.chunk_gates.output(hidden_states), new_state

    def packed(self, tensors: list[torch.Tensor], cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Heads of sequences laid end to end: those of similar length go together as rows, padded on the right."""
        heads = tensors[0].new_zeros(tensors[0].shape[1:])
        for group in group_by_length(cu_seqlens):
            rows, _ = self.attend_chunks([gather_group(x, group) for x in tensors], None, None)
            heads = heads.index_put((group.index[group.valid],), rows[group.valid])
        return heads[None]

    def attend_chunks(
        self, tensors: list[torch.Tensor], padding_mask: torch.Tensor | None, state: State | None
    ) -> tuple[torch.Tensor, State]:
        """Heads `[B, T, H, K]` before the output gate.

        Args:
            tensors: q and k `[B, T, ·, K]` with RoPE; k without, v `[B, T, G, K]`; gates `[B, T, G, K]`; with RoPE cos
                and sin `[B, T, R]`.
        """
        q, turned, k, v, gate, *rope = tensors
        grid = self.grid(q, padding_mask, state)
        running, last = self.running_means(turned if self.options.rope == "token" else k, v, gate, grid, state)
        summary_k, summary_v = running.unbind(3)
        if self.options.rope == "chunk" and rope:
            summary_k = self.rotate(summary_k, summary_k, (rope[0], rope[1]))[1].to(v.dtype)
        slots = chunk_slots(torch.cat([summary_k, summary_v], -1), grid, None if state is None else state["slots"])
        near = (turned, v) if grid.window else (summary_k, summary_v)
        heads, ring = self.attend_pairs(q, *near, slots, grid, state)
        new_state = {"slots": slots, "running": last, "position": grid.seen}
        # The number of tokens stays on the host, which sizes the slots by it.
        new_state["length"] = torch.full((len(q),), grid.before + q.shape[1])
        return heads, new_state if ring is None else new_state | {"window": ring}

    def attend_pairs(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        grid: Grid,
        state: State | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Heads `[B, T, H, K]`, and the ring of the window's keys if there is one; k, v: exact, or the running pairs."""
        options: dict[str, Any] = {
            "window": grid.window,
            "chunk_size": grid.chunk,
            "reach": self.spec.sliding_window,
            "scale": self.spec.scaling,
            "softcap": self.spec.softcap,
        }
        offset = self.chunk_gates.summary_weight + ALL_THE_WEIGHT[self.use]
        keys, values = slots.chunk(2, -1)
        old = None if state is None else state.get("window")
        if state is not None and grid.tokens == 1 and not torch.is_grad_enabled():
            ring = None if old is None else (old[..., : k.shape[-1]], old[..., k.shape[-1] :])
            position = grid.first.clamp_min(0)
            heads = rat_window_attention_step(
                q[:, 0], k[:, 0], v[:, 0], keys, values, offset, ring, position, **options
            )
            return heads[:, None], old
        k, v, origin = with_earlier(k, v, grid, old)
        finished = (grid.before + grid.tokens) // grid.chunk
        keys, values = keys[:, :finished], values[:, :finished]
        heads = rat_window_attention(q, k, v, keys, values, offset, origin=origin, **options)
        return heads, ring_of(k, v, grid, origin) if grid.window else None

    def grid(self, q: torch.Tensor, padding_mask: torch.Tensor | None, state: State | None) -> Grid:
        """Where these tokens stand; padding before a row's first real token does not count."""
        batch, tokens = q.shape[:2]
        before = 0 if state is None else int(state["length"][0])
        first = q.new_zeros(batch, dtype=torch.int64) if state is None else state["position"]
        if padding_mask is not None:
            leading = (padding_mask.cumsum(1) == 0).sum(1)
            first = torch.where(first == 0, -leading, first)
        aligned = state is None and padding_mask is None
        return Grid(first, tokens, before, aligned, self.options.chunk, self.window)

    def running_means(
        self, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, grid: Grid, state: State | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(k̃, ṽ) `[B, T, G, 2, K]` and the last pair `[B, 2G, K]` float32; padding is never read, since the first real
        token starts a chunk."""
        if self.options.start == "token":
            gate = gate * (grid.position % grid.chunk != 0)[..., None, None]
        means, last = gated_scan(
            torch.stack([k, v], 3).flatten(2, 3),
            gate,
            grid.chunk,
            position=0 if grid.aligned else grid.first % grid.chunk,
            initial_state=None if state is None else state["running"],
            output_final_state=True,
        )
        assert last is not None
        return means.unflatten(2, (-1, 2)), last

    @torch.no_grad()
    def calibrate(self, sample: CalibrationSample) -> None:
        """By search, what brings the heads nearest to the teacher's: each kv head's gates, then each head's weight of
        the summaries."""
        if self.options.chunk == 1:
            return
        gates, weight, group = self.chunk_gates.keep, self.chunk_gates.summary_weight, self.spec.group
        if self.options.gate is None:
            starts = torch.tensor(GATES, device=weight.device)
            errors = [self._errors(sample, gates.start_at, start.expand(self.spec.num_kv_heads)) for start in starts]
            gates.start_at(starts[torch.stack(errors).unflatten(1, (-1, group)).sum(-1).argmin(0)])
        candidates = torch.linspace(-4, 4, 9).to(weight)
        errors = [self._errors(sample, weight.copy_, candidate.expand_as(weight)) for candidate in candidates]
        weight.copy_(candidates[torch.stack(errors).argmin(0)])

    def _errors(
        self, sample: CalibrationSample, put: Callable[[torch.Tensor], Any], start: torch.Tensor
    ) -> torch.Tensor:
        """Squared distance `[H]` of the heads to the teacher's after `put(start)`."""
        put(start)
        heads, _ = self.mix(sample.hidden_states, sample.rope, None, None)
        return (heads - sample.heads.float()).square().sum((0, 1, 3))

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        pair = 2 * self.spec.num_kv_heads * self.spec.head_dim
        stored = slot_count(context, self.options.chunk) + ring_size(self.window, self.options.chunk)
        return pair * (stored * dtype.itemsize + 4) + 16
