"""The cache of a student: constant-size states for mixers, the teacher's own cache layers for kept attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)

State = dict[str, torch.Tensor]
"""Named tensors, batch first, whose shapes do not depend on how many tokens were read."""


class MixerCacheLayer(CacheLayerMixin):
    """The state of one mixer. `state` is None until the first tokens were read."""

    is_compileable = True  # its shapes are fixed; static masks of kept layers depend on this being said
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("this layer holds a recurrent state, not keys and values; mixers call advance()")

    def advance(self, state: State, tokens: int) -> None:
        """Take over the state after `tokens` further tokens; keeps the tensors' addresses once they exist."""
        if self.state is None or any(self.state[name].shape != new.shape for name, new in state.items()):
            # Copies: a state is often the end of a longer tensor, all of which a view would keep alive.
            self.state = {name: new.clone() for name, new in state.items()}
        else:
            for name, new in state.items():
                if new is not self.state[name]:
                    self.state[name].copy_(new)
        self.seen += tokens
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.seen = 0
        self.state = None

    def _select(self, indices: torch.Tensor) -> None:
        if self.state is not None:
            self.state = {name: t.index_select(0, indices.to(t.device)) for name, t in self.state.items()}

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(
            torch.arange(indices.numel(), device=indices.device)[indices] if indices.dtype == torch.bool else indices
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = {name: t.repeat_interleave(repeats, dim=0) for name, t in self.state.items()}

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a recurrent state cannot be cropped; assisted decoding needs a softmax model")

    def offload(self) -> None:
        """States are small; they stay where they are."""

    def prefetch(self) -> None:
        """See `offload`."""


class MixerCache(Cache):
    """A `Cache` in which questions about masks and lengths are answered by a layer that has them.

    transformers sizes its masks by the first layer; here that layer may be recurrent, so the question goes to the
    first full-attention layer, else the first attention layer, else the recurrent layer itself.
    """

    def _attention_layer(self, layer_idx: int) -> int:
        if layer_idx < len(self.layers) and isinstance(self.layers[layer_idx], MixerCacheLayer):
            attention = [i for i, layer in enumerate(self.layers) if not isinstance(layer, MixerCacheLayer)]
            full = [i for i in attention if not getattr(self.layers[i], "is_sliding", False)]
            return (full or attention or [layer_idx])[0]
        return layer_idx

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length, self._attention_layer(layer_idx))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(self._attention_layer(layer_idx))


def new_cache(config: PreTrainedConfig, recurrent: set[int], static_length: int | None = None) -> MixerCache:
    """An empty cache: `MixerCacheLayer` for the layers in `recurrent`, the teacher's own kind for the others.

    Args:
        static_length: preallocate the attention layers for so many tokens; None grows them.
    """
    layer_types, layer_kwargs = get_layer_types_and_kwargs(config)
    if isinstance(layer_kwargs, dict):  # transformers before 5.20: the same for all layers
        layer_kwargs = [layer_kwargs] * len(layer_types)
    kinds = DYNAMIC_LAYER_TYPE_MAPPING if static_length is None else STATIC_LAYER_TYPE_MAPPING
    extra = {} if static_length is None else {"max_cache_len": static_length}
    return MixerCache(
        layers=[
            MixerCacheLayer() if i in recurrent else kinds[kind](**kwargs, **extra)
            for i, (kind, kwargs) in enumerate(zip(layer_types, layer_kwargs, strict=True))
        ]
    )
