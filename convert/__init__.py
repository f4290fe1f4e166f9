"""Surgery and checkpoints, no training. Importing this package lets `AutoModelForCausalLM` load students."""

from linearize.convert import model as _model  # noqa: F401  registers the student classes
from linearize.convert.errors import ConversionError
from linearize.convert.export import export
from linearize.convert.plan import LayerPlan, Plan, make_plan
from linearize.convert.surgery import as_teacher, build_student
from linearize.convert.verify import verify

__all__ = [
    "ConversionError", "LayerPlan", "Plan", "as_teacher", "build_student", "export", "make_plan", "verify",
]  # fmt: skip
