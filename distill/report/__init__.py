"""The report of a conversion: `report.html`, the same figures in the model card, and where both come from."""

from linearize.distill.report.writing import write_report

__all__ = ["write_report"]
