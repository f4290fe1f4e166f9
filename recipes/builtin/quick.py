"""A first look: LoRA alone, few tokens, no control.

Source: the second half of `default`.

Numbers: none published; on stories260K see `linearize recipes compare`.

Cost: 50k tokens; under a minute on two CPU cores for the bundled teacher.
"""

from linearize.distill.stages import Lora
from linearize.recipes import Recipe

recipe = Recipe(stages=[Lora(tokens=50_000, learning_rates={"new": 3e-3, "adapters": 5e-4})], control=False)
