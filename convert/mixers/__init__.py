"""Mixers by name. Importing this package registers every built-in one."""

from linearize.convert.mixers import rodimus, softmax, swa  # noqa: F401
from linearize.convert.mixers.base import MIXERS, Mixer, MixerOptions, register

__all__ = ["MIXERS", "Mixer", "MixerOptions", "register"]
