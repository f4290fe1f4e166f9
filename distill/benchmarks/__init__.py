"""Speed and memory of training on one device: what a stage's step takes, and where the time goes."""

from linearize.distill.benchmarks.shapes import SHAPES, random_teacher
from linearize.distill.benchmarks.table import report_json, report_text
from linearize.distill.benchmarks.training import ROWS, Settings, TrainingReport, bench_training

__all__ = [
    "ROWS",
    "SHAPES",
    "Settings",
    "TrainingReport",
    "bench_training",
    "random_teacher",
    "report_json",
    "report_text",
]
