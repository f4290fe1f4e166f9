"""What a recipe leaves open: stages that suit the mixer, measured on the bundled teacher."""

from __future__ import annotations

from linearize.distill.stages import Lora, Stage, Transfer
from linearize.recipes.schema import Recipe

_LARGEST_BATCH = 8
_ENOUGH_STEPS = 350


def stages_of(recipe: Recipe) -> list[Stage]:
    """The recipe's stages, every setting decided."""
    return [_with_batch(stage, recipe) for stage in _written(recipe)]


def _written(recipe: Recipe) -> list[Stage]:
    """The recipe's stages; where it has none, by the mixer's habits.

    A student that starts from a softmax window is nearly right from the beginning and wants a gentle second stage; a
    purely recurrent one has further to go.
    """
    if recipe.stages is not None:
        return list(recipe.stages)
    adapters = 1e-3 if recipe.options.get("window") == 0 else 5e-4
    return [Transfer(), Lora(learning_rates={"new": 3e-3, "adapters": adapters})]


def _with_batch(stage: Stage, recipe: Recipe) -> Stage:
    """The stage with a batch size: many small steps learn more from few tokens, so larger ones wait for more."""
    batch = 1
    context = stage.context or recipe.context
    while batch < _LARGEST_BATCH and stage.tokens // (2 * batch * context) >= _ENOUGH_STEPS:
        batch *= 2
    return stage.model_copy(update={"batch_size": stage.batch_size or batch})


def with_tokens(recipe: Recipe, total: int) -> Recipe:
    """The same recipe with `total` training tokens, divided between the stages as before."""
    stages = _written(recipe)
    before = sum(stage.tokens for stage in stages)
    shares = [round(total * stage.tokens / before) if before else total // len(stages) for stage in stages[:-1]]
    last = [total - sum(shares)] if stages else []
    scaled = [s.model_copy(update={"tokens": n}) for s, n in zip(stages, shares + last, strict=True)]
    return recipe.model_copy(update={"stages": scaled})
