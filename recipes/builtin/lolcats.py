"""LoLCATs: attention transfer into Hedgehog maps beside a window of 64, then LoRA on the text alone.

Source: LoLCATs (arXiv 2410.10254). Stage 1: mean squared error between the attention outputs before o_proj, times 1000,
the teacher's output going on to the next layer; new parameters alone train, at 1e-2, the rate falling on a plateau.
Stage 2: LoRA of rank 8 on q, k, v and o with cross-entropy, at 1e-4. Sequences of 1024, 8 a step.

Numbers: Llama-3-8B, 40M tokens: MMLU 52.8 (teacher 66.6), PIQA 80.9 (79.9), HellaSwag 79.7 (79.1).

Cost: 40M tokens.
"""

from linearize.distill.stages import Lora, Transfer
from linearize.recipes import Recipe

recipe = Recipe(
    to="lolcats",
    options={"window": 64},
    context=1024,
    stages=[
        Transfer(
            tokens=20_000_000, batch_size=8, at="heads", loss="mse", scale=1000.0,
            learning_rates={"new": 1e-2}, schedule="plateau",
        ),
        Lora(
            tokens=20_000_000, batch_size=8, rank=8, alpha=16, ce_weight=1.0, kl_weight=0.0,
            learning_rates={"adapters": 1e-4}, schedule="plateau",
        ),
    ],
)  # fmt: skip
