"""What a conversion gains: time and memory of a model and its attention, beside their peers."""

from .result import BenchmarkReport, BreakEven, Case, Point, Row, SiteGroup
from .run import benchmark_model

__all__ = [
    "BenchmarkReport",
    "BreakEven",
    "Case",
    "Point",
    "Row",
    "SiteGroup",
    "benchmark_model",
]
