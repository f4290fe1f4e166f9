"""A recurrence beside a softmax window: what all such mixers share, so that a mixer's file holds only its recurrence.

    out = W_o (window_t + γ_t (s ⊙ y_t - c ⊙ window_t)),   γ_t = σ(r(x_t) - lse_t)

`y_t` is the recurrence's output, `lse_t` the log-sum-exp of the window's logits and r(x) an estimate of that of the
tokens before the window, so γ estimates the softmax mass outside it. s and c stand per head and channel; s starts
small, so that an uncalibrated student is close to its window. Without a window, out = W_o (s ⊙ y).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from linearize.convert.attention_spec import AttentionSpec
from linearize.convert.cache import State
from linearize.convert.calibration import CalibrationSample, attention_logits, least_squares
from linearize.convert.mixers.base import Mixer, MixerOptions, Rope
from linearize.convert.mixers.parts import Linear, is_step
from linearize.convert.mixers.window import window_bytes, window_mix
from linearize.kernels.branch_join import branch_join
from linearize.kernels.linear_attention import linear_attention, linear_attention_step


class HybridOptions(MixerOptions):
    """Options of every recurrence with a window beside it."""

    window: int = Field(64, ge=0, description="keys of the softmax window beside the recurrence; 0 for none")


class DecayOptions(HybridOptions):
    """Options of those whose decay has a free start."""

    half_life: float | None = Field(
        None,
        gt=0,
        description="initial half-life of the state in tokens; none: by how far the teacher's heads look back, "
        "uncalibrated 64 beside a window and 16 without",
    )
    spread: float | None = Field(
        None,
        ge=1,
        description="half-lives start between half_life / spread and half_life · spread; "
        "none: 8 beside a window, 4 without",
    )

    def half_lives(self, count: int) -> torch.Tensor:
        """Initial half-lives `[count]` of heads or of a head's channels: evenly spaced on a log scale."""
        half_life = self.half_life or (64.0 if self.window else 16.0)
        spread = self.spread or (8.0 if self.window else 4.0)
        steps = torch.linspace(-1, 1, count) if count > 1 else torch.zeros(count)
        return half_life * spread**steps

    def half_lives_after(self, lookback: torch.Tensor, count: int) -> torch.Tensor:
        """Half-lives `[H, count]` for heads that look back `lookback` `[H]` tokens, unless `half_life` is given."""
        spread = self.half_lives(count)
        centre = lookback * math.log(2) if self.half_life is None else torch.full_like(lookback, self.half_life)
        return centre[:, None] * (spread / spread.log().mean().exp()).to(lookback)

    def half_lives_to_try(self, lookback: torch.Tensor, count: int) -> list[torch.Tensor]:
        """`half_lives_after` the lookback and after shorter ones, unless `half_life` is given. Starts to choose from:
        a few distant tokens make a mean lookback long, while most of a head's weight is near.
        """
        shorter = (1, 4, 16) if self.half_life is None else (1,)
        return [self.half_lives_after((lookback / factor).clamp_min(2), count) for factor in shorter]


@dataclass(frozen=True)
class Tokens:
    """What a recurrence reads, kv heads expanded to query heads, zeros at padding.

    In bfloat16 where the teacher's projections come in it, which kernels read much faster; else in float32 (float16
    too: a sum without decay outgrows it).

    Attributes:
        x: `[B, T, D]` the block's normalised input.
        q, k, v: `[B, T, H, K]` as the teacher projects them, before RoPE.
        mask: `[B, T]`, True at real tokens; None when all are real.
        cu_seqlens: `[N + 1]` boundaries of packed sequences, or None.
        rotate: RoPE of q and k at these tokens' positions.
    """

    x: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    rotate: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def linear_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor | None,
        state: State | None,
        bonus: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel on `state["memory"]`; padding leaves the state untouched. Returns o in v's dtype and the next memory.

        One token of decoding updates the memory in place.
        """
        if self.mask is not None:
            v = v * self.mask[..., None, None]
            log_decay = None if log_decay is None else self.masked(log_decay)
        if state is not None and is_step(q, state):
            token = log_decay if log_decay is None or log_decay.dim() == 1 else log_decay[:, 0]
            o = linear_attention_step(q[:, 0], k[:, 0], v[:, 0], state["memory"], token, bonus=bonus, scale=scale)
            return o[:, None], state["memory"]
        o, memory = linear_attention(
            q,
            k,
            v,
            log_decay,
            bonus=bonus,
            scale=scale,
            initial_state=None if state is None else state["memory"],
            output_final_state=True,
            cu_seqlens=self.cu_seqlens,
        )
        assert memory is not None
        return o, memory

    def masked(self, log_decay: torch.Tensor) -> torch.Tensor:
        """Log decays `[H]`, `[B, T, H]` or `[B, T, H, K]` that are 0 at padding, by token where there is any."""
        if self.mask is None:
            return log_decay
        return log_decay * self.mask.view(*self.mask.shape, *(1,) * max(1, log_decay.dim() - 2))


class Recurrence(nn.Module):
    """All new tensors of a mixer's recurrence, which are float32, and what it computes.

    Args:
        layer, layers: the block's index and how many there are.
    """

    def __init__(self, spec: AttentionSpec, options: HybridOptions, layer: int, layers: int) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, tokens: Tokens, state: State | None) -> tuple[torch.Tensor, State]:
        """Output `[B, T, H, V]` and the state after the last token, in float32; `state` is None at a sequence's start.

        Where `is_step(tokens.x, state)`, the state's tensors may be updated in place.
        """
        raise TypeError(f"{type(self).__name__} must implement forward()")

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the state's tensors for one sequence, all float32; default: one matrix per head."""
        return {"memory": (self.spec.num_heads, self.spec.head_dim, self.spec.head_dim)}

    def calibrate(self, tokens: Tokens, heads: torch.Tensor, lookback: torch.Tensor) -> None:
        """Set new tensors in closed form; default: keep the start.

        Args:
            heads: `[B, T, H, V]` the teacher's heads.
            lookback: `[H]` how many tokens each head looks back, on average; with a window, among the tokens
                before it.
        """

    def starts(self, tokens: Tokens, lookback: torch.Tensor) -> list[list[dict[str, torch.Tensor]]]:
        """Rounds of starts, from each of which every head takes the one nearest to the teacher's; default: none.

        A start gives values `[H, ...]`, head by head, to parameters by name. Rounds follow one another after `calibrate`.
        """
        return []


class Branch(nn.Module):
    """How the recurrence's output joins the window's: s, c and r of the module's docstring. float32."""

    def __init__(self, spec: AttentionSpec, window: int) -> None:
        super().__init__()
        shape = (spec.num_heads, spec.head_dim)
        self.scale = nn.Parameter(torch.full(shape, 0.01 if window else 1.0))
        if window:
            self.window_part = nn.Parameter(torch.zeros(shape))
            self.log_mass = Linear(spec.hidden_size, spec.num_heads)
            nn.init.zeros_(self.log_mass.weight)
            nn.init.zeros_(self.log_mass.bias)

    def logit(self, x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Of γ, `[B, T, H]`, from x `[B, T, D]` and lse `[B, T, H]`."""
        return self.log_mass(x) - lse

    def share(self, x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """γ `[B, T, H, 1]`; arguments as `logit`."""
        return torch.sigmoid(self.logit(x, lse))[..., None]

    def alone(self, y: torch.Tensor) -> torch.Tensor:
        """Heads without a window."""
        return self.scale * y

    def forward(self, y: torch.Tensor, window: torch.Tensor, x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Heads beside a window `[B, T, H, V]`; y and window of that shape, x and lse as for `logit`."""
        return branch_join(y, window, self.logit(x, lse), self.scale, self.window_part)


class Hybrid(Mixer):
    """A mixer made of a `Recurrence` and a window; a subclass names itself, its options and its recurrence."""

    Options = HybridOptions
    recurrence_class: ClassVar[type[Recurrence]]
    options: HybridOptions
    float32_modules: ClassVar[tuple[str, ...]] = ("recurrence", "branch")
    separable = True

    def __init__(self, spec: AttentionSpec, attention: nn.Module, layer_idx: int, options: HybridOptions) -> None:
        super().__init__(spec, attention, layer_idx, options)
        layers = self.attention.config.num_hidden_layers
        self.recurrence = self.recurrence_class(spec, options, layer_idx, layers)
        self.branch = Branch(spec, options.window)

    @property
    def window(self) -> int:
        """Keys of the window: never more than the teacher's own."""
        return min(self.options.window, self.spec.sliding_window or self.options.window)

    def tokens(
        self,
        hidden_states: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
    ) -> Tokens:
        """q `[B, T, H, K]`, k and v `[B, T, H_kv, K]` as `project` returns them."""
        dtype = v.dtype if v.dtype == torch.bfloat16 else torch.float32
        x, q, k, v = (t.to(dtype) for t in (hidden_states, q, self.expand(k), self.expand(v)))
        if padding_mask is not None:
            x = x * padding_mask[..., None]
            q, k, v = (t * padding_mask[..., None, None] for t in (q, k, v))
        turns = None if rope is None else (rope[0].to(dtype), rope[1].to(dtype))
        return Tokens(x, q, k, v, padding_mask, cu_seqlens, lambda a, b: self.rotate(a, b, turns))

    def mix(
        self,
        hidden_states: torch.Tensor,
        rope: Rope | None,
        padding_mask: torch.Tensor | None,
        state: State | None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, State]:
        q, k, v = self.project(hidden_states)
        tokens = self.tokens(hidden_states, q, k, v, rope, padding_mask, cu_seqlens)
        with torch.autocast(hidden_states.device.type, enabled=False):  # decays and gates stay in float32
            y, new_state = self.recurrence(tokens, state)
            if not self.window:
                return self.branch.alone(y), new_state
            q, k = self.rotate(q, k, rope)
            window, lse, window_state = window_mix(self.spec, self.window, q, k, v, padding_mask, state, cu_seqlens)
            heads = self.branch(y, window, tokens.x, lse)
        if self.use != "both":
            heads = window if self.use == "window" else self.branch.alone(y)
        return heads, {**new_state, **window_state}

    @torch.no_grad()
    def calibrate(self, sample: CalibrationSample) -> None:
        """The recurrence's own start, then s and c by least squares on the teacher's heads, r's bias by its mean."""
        q, k, v = self.project(sample.hidden_states)
        tokens = self.tokens(sample.hidden_states, q.float(), k.float(), v.float(), sample.rope, None, None)
        logits = outside_window(attention_logits(self, sample), self.window)
        far = lookback(logits, self.window)
        branch, heads = self.branch, sample.heads.float()
        self.recurrence.calibrate(tokens, heads, far)
        if not self.window:
            factors = self._fit(tokens, far, heads)
            branch.scale.copy_(factors.expand_as(branch.scale))
            return
        q, k = self.rotate(q, k, sample.rope)
        window, lse, _ = window_mix(self.spec, self.window, q, k, v, None, None)
        branch.log_mass.bias.copy_(mean_log_mass(logits, branch.log_mass.bias))
        share, window = branch.share(tokens.x, lse), window.float()
        factors = self._fit(tokens, far, heads - window, share, -share * window)
        branch.scale.copy_(factors[:, :1].expand_as(branch.scale))
        branch.window_part.copy_(factors[:, 1:].expand_as(branch.scale))

    def _fit(
        self,
        tokens: Tokens,
        far: torch.Tensor,
        target: torch.Tensor,
        share: float | torch.Tensor = 1.0,
        *others: torch.Tensor,
    ) -> torch.Tensor:
        """Give every head the best of the recurrence's starts; the factors of `share * y` and of the others."""

        def factors_and_error() -> tuple[torch.Tensor, torch.Tensor]:
            regressors = [share * self.recurrence(tokens, None)[0], *others]
            factors = least_squares(regressors, target)
            fitted = sum(factors[:, i, None] * x for i, x in enumerate(regressors))
            return factors, (fitted - target).square().sum((0, 1, 3))

        parameters = dict(self.recurrence.named_parameters())
        for starts in self.recurrence.starts(tokens, far):
            errors = []
            for start in starts:
                for name, value in start.items():
                    parameters[name].view(value.shape).copy_(value)
                errors.append(factors_and_error()[1])
            best = torch.stack(errors).argmin(0)
            for name, value in starts[0].items():
                choices = torch.stack([start[name] for start in starts])
                parameters[name].view(value.shape).copy_(choices[best, torch.arange(len(best), device=best.device)])
        return factors_and_error()[0]

    def state_bytes(self, context: int, dtype: torch.dtype) -> int:
        memory = sum(4 * math.prod(shape) for shape in self.recurrence.state_shapes().values())
        return memory + (window_bytes(self.spec, self.window, dtype) if self.window else 0)


def outside_window(logits: torch.Tensor, window: int) -> torch.Tensor:
    """Logits `[B, H, T, T]` with -inf at the keys of the window."""
    index = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(index[:, None] - index < window, -torch.inf)


def mean_log_mass(logits: torch.Tensor, default: torch.Tensor) -> torch.Tensor:
    """Mean log-sum-exp `[H]` of logits `[B, H, T, T]` over the queries that see a key; `default` where none does."""
    mass = logits.logsumexp(-1)
    seen = mass > -torch.inf
    mean = torch.where(seen, mass, 0).sum((0, 2)) / seen.sum((0, 2)).clamp_min(1)
    return torch.where(seen.any(2).any(0), mean, default)


def lookback(logits: torch.Tensor, window: int) -> torch.Tensor:
    """Mean distance `[H]` that the later half of the queries looks back, at least window + 1."""
    tokens = logits.shape[-1]
    index = torch.arange(tokens, device=logits.device)
    distance = (index[:, None] - index).clamp_min(0)
    later = logits[:, :, tokens // 2 :]
    mean = (later.softmax(-1).nan_to_num(0) * distance[tokens // 2 :]).sum(-1)
    seen = (later > -torch.inf).any(-1)
    return (torch.where(seen, mean, 0).sum((0, 2)) / seen.sum((0, 2)).clamp_min(1)).clamp_min(window + 1)
