"""Mixers by name. Importing this package imports every module in it, so a file with a `@register` is enough."""

import importlib
import pkgutil

from linearize.convert.mixers.base import MIXERS, Mixer, MixerOptions, register

__all__ = ["MIXERS", "Mixer", "MixerOptions", "register"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
