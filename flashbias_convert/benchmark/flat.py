"""A report as one table: a line per row, for spreadsheets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .result import BenchmarkReport, Row

#: columns, in order; empty where they say nothing
COLUMNS = (
    "part", "inputs", "site", "sites", "batch", "heads", "n", "m", "head_dim", "terms", "rank",
    "causal", "row", "status", "verdict", "reason", "median_ms", "p20_ms", "p80_ms", "repeats",
    "peak_mib", "per_second", "first_call_s", "difference_max", "difference_rms", "device",
    "device_name", "dtype", "torch", "triton",
)  # fmt: skip


def flat_rows(report: BenchmarkReport) -> list[dict[str, Any]]:
    """One mapping of `COLUMNS` to values per row of a report, whole models first."""
    run = {
        "device": report.device,
        "device_name": report.device_name,
        "dtype": report.dtype,
        "torch": report.versions.get("torch", ""),
        "triton": report.versions.get("triton", ""),
    }
    return [{**dict.fromkeys(COLUMNS, ""), **found, **run} for found in _parts(report)]


def _parts(report: BenchmarkReport) -> Iterator[dict[str, Any]]:
    for case in report.cases:
        for row in case.rows:
            yield {"part": "model", "inputs": case.inputs, "batch": case.size, **_values(row)}
    for case in report.cases:
        for group in case.sites:
            about = {
                "part": "site",
                "inputs": case.inputs,
                "batch": "x".join(map(str, group.batch)),
                "n": group.n,
                "m": group.m,
                **_about(group),
            }
            for row in group.rows:
                yield {**about, **_values(row)}
    for one in report.break_even:
        for point in one.points:
            about = {"part": "break-even", "batch": point.batch, "n": point.n, "m": point.n}
            for row in point.rows:
                yield {**about, **_about(one), **_values(row)}


def _about(kind: Any) -> dict[str, Any]:
    """What a `SiteGroup` and a `BreakEven` have in common."""
    return {
        "site": kind.sites[0],
        "sites": len(kind.sites),
        "heads": kind.heads,
        "head_dim": kind.head_dim,
        "terms": "+".join(kind.terms),
        "rank": "" if kind.rank is None else kind.rank,
        "causal": kind.causal,
    }


def _values(row: Row) -> dict[str, Any]:
    plain = row.to_dict()
    times = plain.pop("times") or {}
    del plain["ratios"]
    name = plain.pop("name")
    known = {k: v for k, v in {**plain, **times}.items() if v is not None}
    return {"row": name, **known}
