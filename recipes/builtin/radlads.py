"""RADLADS: attention outputs, then predictions with all parameters, then longer sequences.

Source: RADLADS (arXiv 2505.03005). Stage 1: L2 of the attention outputs, every tensor of the mixers, 512 tokens a
sequence, 1e-3 falling to 1e-5. Stage 2: KL of the logits, all parameters. Stage 3: cross-entropy at 16k tokens.
Skipping stage 1, or freezing the MLPs in stage 2, hurt. The paper's mixer is RWKV-7; `rwkv6` is the nearest here.

Numbers: Qwen2.5-7B to RWKV-7, at most 0.7B tokens: MMLU 68.2, PIQA 79.8, HellaSwag 79.3 (zero-shot).

Cost: 350–700M tokens; the authors give less than 2,000 USD for a 72B teacher.
"""

from linearize.distill.stages import Context, Logits, Transfer
from linearize.recipes import Recipe

recipe = Recipe(
    to="rwkv6",
    options={"window": 0},
    context=512,
    stages=[
        Transfer(tokens=100_000_000, loss="mse", learning_rates={"mixer": 1e-3}, final_rate=0.01),
        Logits(tokens=500_000_000, learning_rates={"all": 1e-5}, schedule="constant"),
        Context(tokens=100_000_000, context=16_384, learning_rates={"all": 1e-5}, schedule="constant"),
    ],
)
