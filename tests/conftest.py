"""Settings for all tests: workers share the cores, so each uses one; examples have no time limit of their own.

Property tests draw the same examples in every run, so that what fails has changed. `HYPOTHESIS_PROFILE=explore` draws new ones.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
