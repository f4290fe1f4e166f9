"""The student classes: any decoder's own class with mixers in place of attention.

`student_class(Base)` makes `Linearized<Base>` from the teacher's class, with a configuration subclass that adds one
field, `linearize`: the plan and where it came from. All student configurations share the model type `linearized`;
which family it is stands in that field, so `AutoModelForCausalLM` finds the class when it reads the file.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from linearize.convert.attention_spec import describe_attention, find_layers
from linearize.convert.cache import MixerCache, new_cache
from linearize.convert.channel_mixers import CHANNEL_MIXERS
from linearize.convert.errors import ConversionError
from linearize.convert.mixers import MIXERS, Mixer
from linearize.convert.plan import LayerPlan, Plan, channel_mixer_class, mixer_class

MODEL_TYPE = "linearized"
PACKAGE_VERSION = 2
"""Version of the `linearize` field; a reader refuses what is newer. An exported student names every option since 2."""


class LinearizedConfig(PreTrainedConfig):
    """Entry point for `AutoConfig`: turns a saved configuration into its family's subclass."""

    model_type = MODEL_TYPE
    linearize: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        field = config_dict.get("linearize") or {}
        if not field:
            raise ConversionError("config.json has model_type 'linearized' but no 'linearize' field; convert again")
        if field["version"] > PACKAGE_VERSION:
            raise ConversionError(f"this student was written by a newer linearize (format {field['version']}); upgrade")
        base: Any = CONFIG_MAPPING[field["base_model_type"]]
        return student_config_class(base).from_dict(config_dict, **kwargs)


class _StudentConfigMixin:
    linearize: dict[str, Any] | None = None

    @property
    def plan(self) -> Plan:
        assert self.linearize is not None
        layers = self.linearize["layers"]
        return Plan.from_config([_of_version_1(layer) for layer in layers] if self.linearize["version"] < 2 else layers)


def _of_version_1(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer that names only the options that were given, with defaults that have changed since: SiLU in `rodimus`."""
    options, without = layer["options"], {"silu": False}
    if layer["mixer"] in ("rodimus", "rodimus++"):
        options = {**without, **options}
    elif layer["mixer"] == "head-hybrid" and options.get("mixer", "rodimus") == "rodimus":
        options = {**options, "options": {**without, **options.get("options", {})}}
    return {**layer, "options": options}


class Linearized:
    """Mixed into the teacher's class: builds the mixers, hands them the padding mask, makes their cache."""

    _is_stateful = True  # assisted decoding would have to take tokens back

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        install_mixers(cast(PreTrainedModel, self), config.plan)

    @property
    def mixers(self) -> list[Mixer]:
        """The mixers in layer order; kept layers have none."""
        layers, name = find_layers(cast(nn.Module, self), self.config)  # type: ignore[attr-defined]
        return [m for block in layers if isinstance(m := getattr(block, name), Mixer)]

    def new_cache(self, static_length: int | None = None) -> MixerCache:
        """An empty cache for this student (see `linearize.convert.cache.new_cache`)."""
        recurrent = {mixer.layer_idx for mixer in self.mixers if mixer.recurrent}
        return new_cache(self.config, recurrent, static_length)  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,  # named so that generate() counts positions from the padding mask
        padding_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """The teacher's forward. `attention_mask` `[B, S]` also reaches the mixers, as `padding_mask`."""
        if padding_mask is None and torch.is_tensor(attention_mask) and attention_mask.ndim == 2:
            padding_mask = attention_mask
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):  # type: ignore[attr-defined]
            past_key_values = self.new_cache()
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            padding_mask=padding_mask,
            **kwargs,
        )

    def prepare_inputs_for_generation(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, **kwargs)  # type: ignore[misc]
        if torch.is_tensor(attention_mask) and attention_mask.ndim == 2:
            tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            inputs["padding_mask"] = attention_mask[:, -tokens.shape[1] :]
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], mode: Any, batch: int, max_length: int
    ) -> Any:
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            kind = generation_config.cache_implementation
            if kind not in (None, "dynamic", "static"):
                raise ValueError(f"cache_implementation={kind!r}: students have 'dynamic' and 'static' caches")
            model_kwargs["past_key_values"] = self.new_cache(max_length if kind == "static" else None)
            return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch, max_length)  # type: ignore[misc]

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False  # the first call makes the states, so a graph of it would be of no use

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("continuous batching needs a paged KV cache, which recurrent mixers have not; use generate()")

    init_continuous_batching = generate_batch


def install_mixers(model: PreTrainedModel, plan: Plan) -> None:
    """Replace the attention, and the MLP, of every planned layer, in place, by mixers at their starting values.

    Raises:
        ConversionError: the plan's length is not the model's, or a part of the model is not understood.
    """
    layers, name = find_layers(model, model.config)
    if len(plan.layers) != len(layers):
        raise ConversionError(f"the plan has {len(plan.layers)} layers, the model {len(layers)}")
    for block, layer in zip(layers, plan.layers, strict=True):
        install_block(block, name, layer, model.config)


def install_block(block: Any, attention_name: str, layer: LayerPlan, config: Any) -> None:
    """What `install_mixers` does to one block."""
    attention = getattr(block, attention_name)
    if layer.ffn is not None:
        _install_channel_mixer(block, int(attention.layer_idx), layer, config)
    if not layer.kept:  # after the MLP, to which a mixer may hold on
        spec = describe_attention(attention, config)
        mixer = mixer_class(layer.mixer).from_attention(spec, attention, **layer.options)
        mixer.train(attention.training).install(block, attention_name)


def _install_channel_mixer(block: Any, layer_idx: int, layer: LayerPlan, config: Any) -> None:
    if not isinstance(mlp := getattr(block, "mlp", None), nn.Module):
        raise ConversionError(
            f"layer {layer_idx}: {type(block).__name__} has no `mlp`, so --ffn {layer.ffn} cannot replace it"
        )
    assert layer.ffn is not None
    kind = channel_mixer_class(layer.ffn)
    block.mlp = kind.from_mlp(mlp, layer_idx, config.hidden_size, **layer.ffn_options).train(mlp.training)


@functools.cache
def student_config_class(base: Any) -> Any:
    """The configuration class of students of one family, registered with the auto classes."""
    config_class = type(
        "Linearized" + base.__name__,
        (_StudentConfigMixin, base),
        {
            "model_type": MODEL_TYPE,
            "linearize": None,
            "__annotations__": {"linearize": "dict | None"},
            "__module__": __name__,
        },
    )
    model_class = _student_model_class(MODEL_FOR_CAUSAL_LM_MAPPING[base], config_class)
    AutoModelForCausalLM.register(config_class, model_class)
    if base in TOKENIZER_MAPPING:
        TOKENIZER_MAPPING.register(config_class, TOKENIZER_MAPPING[base])
    return config_class


def _student_model_class(base: Any, config_class: Any) -> Any:
    kinds: list[Any] = [*MIXERS.values(), *CHANNEL_MIXERS.values()]
    float32 = sorted({module for kind in kinds for module in kind.float32_modules})
    strict = list(getattr(base, "_keep_in_fp32_modules_strict", None) or [])
    attributes = {
        "config_class": config_class,
        "_keep_in_fp32_modules_strict": strict + float32,
        "__module__": __name__,
        "__doc__": f"{base.__name__} with other mixers in place of softmax attention.",
    }
    return type("Linearized" + base.__name__, (Linearized, base), attributes)


def student_classes(base_model_type: str) -> tuple[Any, Any]:
    """The configuration and model class for a family, by its model type (`llama`, `qwen2`, ...)."""
    base: Any = CONFIG_MAPPING[base_model_type]
    config_class = student_config_class(base)
    return config_class, AutoModelForCausalLM._model_mapping[config_class]


AutoConfig.register(MODEL_TYPE, LinearizedConfig)
