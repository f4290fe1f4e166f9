"""Rodimus++: the recurrence, then window attention with one key for all heads, trained as `default` is.

Source: Rodimus* (arXiv 2410.06577). The paper trains Rodimus++ from scratch; converting a teacher to it is this
package's.

Numbers: none published for conversions.

Cost: 300k tokens here; scale with the teacher.
"""

from linearize.distill.stages import Lora, Transfer
from linearize.recipes import Recipe

recipe = Recipe(
    to="rodimus++",
    stages=[
        Transfer(tokens=200_000, learning_rates={"new": 1e-2, "adapters": 3e-3}),
        Lora(tokens=100_000, learning_rates={"new": 3e-3, "adapters": 5e-4}),
    ],
)
