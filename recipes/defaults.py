"""What a recipe leaves open: stage settings that suit the mixer, measured on the bundled teacher."""

from __future__ import annotations

from typing import NamedTuple

from linearize.distill.stages.lora import Lora
from linearize.distill.stages.transfer import Transfer
from linearize.recipes.schema import Recipe


class Stages(NamedTuple):
    """The stages of a conversion with every setting decided."""

    transfer: Transfer
    lora: Lora


def stages_of(recipe: Recipe) -> Stages:
    """The recipe's stages, the missing ones by the mixer's habits.

    A student that starts from a softmax window is nearly right from the beginning: its new tensors learn fast and its
    projections hardly move. A purely recurrent one has to change its projections too, from the first stage on.
    """
    recurrent_only = recipe.options.get("window") == 0
    transfer = Transfer(adapter_learning_rate=1e-3) if recurrent_only else Transfer()
    return Stages(recipe.transfer or transfer, recipe.lora or Lora())


def with_tokens(recipe: Recipe, total: int) -> Recipe:
    """The same recipe with `total` training tokens, divided between the stages as before."""
    transfer, lora = stages_of(recipe)
    before = transfer.tokens + lora.tokens
    first = round(total * transfer.tokens / before) if before else total // 2
    return recipe.model_copy(
        update={
            "transfer": transfer.model_copy(update={"tokens": first}),
            "lora": lora.model_copy(update={"tokens": total - first}),
        }
    )
