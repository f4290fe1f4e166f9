"""Channel mixers by name. Importing this package imports every module in it, so a file with a `@register` is enough."""

import importlib
import pkgutil

from linearize.convert.channel_mixers.base import CHANNEL_MIXERS, ChannelMixer, ChannelMixerOptions, register

__all__ = ["CHANNEL_MIXERS", "ChannelMixer", "ChannelMixerOptions", "register"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
