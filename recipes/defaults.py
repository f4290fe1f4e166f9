"""What a recipe leaves open: stage settings that suit the mixer, measured on the bundled teacher."""

from __future__ import annotations

from typing import NamedTuple

from linearize.distill.stages.lora import Lora
from linearize.distill.stages.transfer import Transfer
from linearize.recipes.schema import Recipe

_LARGEST_BATCH = 8
_ENOUGH_STEPS = 350


class Stages(NamedTuple):
    """The stages of a conversion with every setting decided."""

    transfer: Transfer
    lora: Lora


def stages_of(recipe: Recipe) -> Stages:
    """The recipe's stages, the missing ones by the mixer's habits.

    A student that starts from a softmax window is nearly right from the beginning and wants a gentle second stage; a
    purely recurrent one has further to go.
    """
    recurrent_only = recipe.options.get("window") == 0
    transfer = recipe.transfer or Transfer()
    lora = recipe.lora or Lora(learning_rate=1e-3 if recurrent_only else 5e-4)
    return Stages(
        transfer.model_copy(update={"batch_size": transfer.batch_size or _batch(transfer.tokens, recipe.context)}),
        lora.model_copy(update={"batch_size": lora.batch_size or _batch(lora.tokens, recipe.context)}),
    )


def _batch(tokens: int, context: int) -> int:
    """Sequences per step: many small steps learn more from few tokens, so larger batches wait for more of them."""
    batch = 1
    while batch < _LARGEST_BATCH and tokens // (2 * batch * context) >= _ENOUGH_STEPS:
        batch *= 2
    return batch


def with_tokens(recipe: Recipe, total: int) -> Recipe:
    """The same recipe with `total` training tokens, divided between the stages as before."""
    transfer, lora = stages_of(recipe)
    before = transfer.tokens + lora.tokens
    first = round(total * transfer.tokens / before) if before else total // 2

    def batch(given: Transfer | Lora | None) -> int | None:
        return None if given is None else given.batch_size  # decided anew unless the recipe says

    return recipe.model_copy(
        update={
            "transfer": transfer.model_copy(update={"tokens": first, "batch_size": batch(recipe.transfer)}),
            "lora": lora.model_copy(update={"tokens": total - first, "batch_size": batch(recipe.lora)}),
        }
    )
