"""Training stages, one file each: settings, what they minimise, over which tensors."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from linearize.distill.stages.anneal import Anneal
from linearize.distill.stages.base import Round, Stage, Workbench
from linearize.distill.stages.context import Context
from linearize.distill.stages.hidden import Hidden
from linearize.distill.stages.logits import Logits
from linearize.distill.stages.lora import Lora
from linearize.distill.stages.matrix import Matrix
from linearize.distill.stages.preference import Preference
from linearize.distill.stages.sft import Sft
from linearize.distill.stages.stepwise import Stepwise
from linearize.distill.stages.transfer import Transfer

AnyStage = Annotated[
    Transfer | Matrix | Hidden | Logits | Lora | Sft | Preference | Context | Stepwise | Anneal,
    Field(discriminator="kind"),
]
"""One stage of a recipe, told by its `kind`."""

STAGES: dict[str, type[Stage]] = {
    stage.model_fields["kind"].default: stage
    for stage in (Transfer, Matrix, Hidden, Logits, Lora, Sft, Preference, Context, Stepwise, Anneal)
}
"""Every stage's settings by its kind."""

__all__ = [
    "STAGES",
    "Anneal",
    "AnyStage",
    "Context",
    "Hidden",
    "Logits",
    "Lora",
    "Matrix",
    "Preference",
    "Round",
    "Sft",
    "Stage",
    "Stepwise",
    "Transfer",
    "Workbench",
]
