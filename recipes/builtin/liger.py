"""Liger: gates out of the teacher's own keys, no new parameter, one stage of LoRA.

Source: Liger (arXiv 2503.01496). LoRA of rank 8 on q, k and v with cross-entropy at 1e-3; half the output from a
window of 64, half from gated linear attention.

Numbers: Llama-3-8B, 20M tokens: MMLU 43.4 (teacher 66.6), PIQA 80.3 (79.9), HellaSwag 76.3 (79.1).

Cost: 20M tokens.
"""

from linearize.distill.stages import Lora
from linearize.recipes import Recipe

recipe = Recipe(
    to="liger",
    options={"window": 64},
    context=1024,
    stages=[
        Lora(
            tokens=20_000_000, batch_size=8, rank=8, alpha=8, targets=["q_proj", "k_proj", "v_proj"],
            ce_weight=1.0, kl_weight=0.0, learning_rates={"adapters": 1e-3},
        )
    ],
)  # fmt: skip
