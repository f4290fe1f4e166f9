"""MOHAWK: mixing matrices, then hidden states, then everything by the teacher's predictions; Mamba-2 mixers.

Source: Transformers to SSMs (arXiv 2408.10189). Stage 1 orients the mixing matrices (Frobenius distance to the
teacher's attention weights), stage 2 aligns each layer's hidden states, stage 3 distils the logits with all
parameters. Mixing matrices need a mixer that is linear in its values; of `mamba2` that is the pure form without
activation behind the values, so here the gated linear attention `rodimus` without a window stands for the discrete
Mamba-2 of the paper.

Numbers: Phi-1.5 (1.3B), 3B tokens: average of six zero-shot tasks 62.6 (teacher 67.2).

Cost: 3B tokens in the paper (80M, 160M and 2.76B); matrices limit stage 1 to short sequences.
"""

from linearize.distill.stages import Hidden, Logits, Matrix
from linearize.recipes import Recipe

recipe = Recipe(
    to="rodimus",
    options={"window": 0},
    context=2048,
    stages=[
        Matrix(tokens=80_000_000, context=64, learning_rates={"new": 5e-4, "mixer": 5e-4}, schedule="wsd"),
        Hidden(tokens=160_000_000, loss="l2", learning_rates={"mixer": 5e-4}, schedule="wsd"),
        Logits(tokens=2_760_000_000, learning_rates={"all": 5e-4}, schedule="wsd"),
    ],
)
