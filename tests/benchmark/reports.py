"""A report as a card would make it: made up, for what is shown of it."""

from __future__ import annotations

from flashbias_convert.benchmark import BenchmarkReport, BreakEven, Case, Point, Row, SiteGroup
from flashbias_convert.benchmark.models import CONVERTED, ORIGINAL
from flashbias_convert.benchmark.peers import FLEX, OURS, SDPA
from flashbias_convert.benchmark.timing import Times


def row(name: str, ms: float) -> Row:
    times = Times(ms, ms, ms, 20)
    return Row(name, "measured", "within rounding", "", times, 1234.5, None, 0.1)


def report_of_a_card() -> BenchmarkReport:
    rows = (row(OURS, 1.0), row(SDPA, 2.0), Row(FLEX, "failed", reason="out of memory"))
    sites = ("a", "b")
    group = SiteGroup(sites, (8,), 4, 4, 128, 128, 32, ("alibi",), None, True, False, rows)
    points = (Point(32, 32, rows), Point(64, 16, rows))
    even = BreakEven(
        sites, 4, 32, ("alibi",), None, True, False, None, points, 64,
        "faster from N = 64 on, up to 64",
    )  # fmt: skip
    case = Case("batch 8: input (8, 128)", 8, (row(ORIGINAL, 3.0), row(CONVERTED, 1.0)), (group,))
    return BenchmarkReport(
        "cuda:0", "a card", "bfloat16", {"torch": "2"}, None, 20, "the Triton kernel", (case,),
        (even,),
    )  # fmt: skip
