"""RAT by annealing: chunks of one token, which is softmax attention, grow to sixteen.

Source: RAT (arXiv 2507.04416) for the mixer; growing the chunk is this package's. At chunks of one token the student
equals its teacher, and every doubling is learned from the teacher's outputs, then all is polished by predictions.

Numbers: none published. An earlier trial without a transfer objective lost to starting at 16 (0.66 against 0.44
nats).

Cost: 400k tokens here; scale with the teacher.
"""

from linearize.distill.stages import Anneal, Lora
from linearize.recipes import Recipe

recipe = Recipe(
    to="rat",
    options={"chunk": 1},
    stages=[
        Anneal(
            tokens=250_000, option="chunk", values=[1, 2, 4, 8, 16], learn="transfer",
            learning_rates={"new": 1e-2, "mixer": 1e-3},
        ),
        Lora(tokens=150_000, learning_rates={"new": 3e-3, "adapters": 5e-4}),
    ],
)  # fmt: skip
