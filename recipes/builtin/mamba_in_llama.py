"""The Mamba in the Llama: layers replaced in steps, then fine-tuning on conversations, then preferences.

Source: The Mamba in the Llama (arXiv 2408.15237). Mamba-2 mixers take over q, k, v and o (B, C and x); a quarter to a
half of the layers keep attention, the others change in rounds under the teacher's logits, MLPs frozen; then
supervised fine-tuning, then DPO with β 0.01. Give conversations and preferences with `data` of the stages `sft` and
`preference`; without, passages of the text stand in for both, which teaches no manners.

Numbers: Llama-3-8B, half attention, 20B tokens: MMLU 56.7 (teacher 66.6), PIQA 81.5 (79.9), HellaSwag 79.5 (79.1).

Cost: 20B tokens in the paper.
"""

from linearize.distill.stages import Preference, Sft, Stepwise
from linearize.recipes import Recipe

recipe = Recipe(
    to="mamba2",
    options={"window": 0},
    keep_softmax="50%",
    context=2048,
    stages=[
        Stepwise(
            tokens=15_000_000_000, rounds=2, order="spread", ce_weight=0.0, kl_weight=1.0,
            learning_rates={"mixer": 2e-5, "new": 1e-3},
        ),
        Sft(tokens=4_900_000_000, learning_rates={"all": 2e-5}),
        Preference(tokens=100_000_000, beta=0.01, rank=32, alpha=64, learning_rates={"adapters": 1e-5}),
    ],
)  # fmt: skip
