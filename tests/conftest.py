"""Settings for all tests: workers share the cores, so each uses one; examples have no time limit of their own."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
