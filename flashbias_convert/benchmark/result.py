"""The result of a benchmark: rows of models, rows of sites, and where a conversion breaks even."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from .timing import Times

Status = Literal["measured", "wrong", "failed", "not measured"]


@dataclass(frozen=True)
class Row:
    """One way to compute a model or its attention.

    Attributes:
        name: which.
        status: "measured"; "wrong": it ran, but what it returned is not what it must be, so its
            speed means nothing; "failed"; "not measured": it was not tried.
        verdict: what a comparison of the outputs found.
        reason: why it is wrong, failed or was not measured; "" otherwise.
        times: None if it did not run.
        peak_mib: see `Measured`.
        per_second: samples per second; None for sites.
        first_call_s: seconds of the first call, what it compiles included.
        ratios: by name of another row, how many times as fast as that row this one is; empty if
            either is not "measured".
        difference_max, difference_rms: of the outputs from those of the original in eager mode
            (sites: of the result from attention in float64); None if they were not compared.
    """

    name: str
    status: Status
    verdict: str = ""
    reason: str = ""
    times: Times | None = None
    peak_mib: float | None = None
    per_second: float | None = None
    first_call_s: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    difference_max: float | None = None
    difference_rms: float | None = None

    @property
    def median_ms(self) -> float | None:
        """Median time of a row whose result is right."""
        return self.times.median_ms if self.times and self.status == "measured" else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; None where a number is not finite."""
        times = None if self.times is None else self.times.to_dict()
        plain = {k: _plain(v) for k, v in vars(self).items()}
        return {**plain, "times": times, "ratios": dict(self.ratios)}


@dataclass(frozen=True)
class SiteGroup:
    """Sites whose attention is called with the same sizes and the same kinds of terms.

    Attributes:
        sites: their names; the first was measured.
        batch: leading dimensions of q.
        heads, kv_heads, n, m, head_dim: sizes of the call.
        terms: kinds of the terms.
        rank: largest rank of a low-rank term; None without one.
        causal, cosine: as in `flashbias_attention`.
        rows: the converted attention, and its peers with the same bias as a dense matrix.
    """

    sites: tuple[str, ...]
    batch: tuple[int, ...]
    heads: int
    kv_heads: int
    n: int
    m: int
    head_dim: int
    terms: tuple[str, ...]
    rank: int | None
    causal: bool
    cosine: bool
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        lists = {name: list(getattr(self, name)) for name in ("sites", "batch", "terms")}
        return {**vars(self), **lists, "rows": [row.to_dict() for row in self.rows]}


@dataclass(frozen=True)
class Case:
    """One batch of inputs through everything.

    Attributes:
        inputs: what went in, in words.
        size: number of samples.
        rows: whole models.
        sites: their attention.
        notes: what the user should know.
    """

    inputs: str
    size: int
    rows: tuple[Row, ...]
    sites: tuple[SiteGroup, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "inputs": self.inputs,
            "size": self.size,
            "rows": [row.to_dict() for row in self.rows],
            "sites": [group.to_dict() for group in self.sites],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Point:
    """Converted attention and its peers at one length.

    Attributes:
        n: number of queries and of keys.
        batch: how many sequences or windows.
        rows: as in `SiteGroup`.
    """

    n: int
    batch: int
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"n": self.n, "batch": self.batch, "rows": [row.to_dict() for row in self.rows]}


@dataclass(frozen=True)
class BreakEven:
    """From which length on the converted attention is faster than a dense bias, as measured.

    Attributes:
        sites: those that have these heads and kinds of terms.
        heads, head_dim, terms, rank, causal, cosine: as in `SiteGroup`.
        fixed_n: N of the sites if their terms are for that one only, so that other lengths are
            synthetic; None if the model takes any length.
        points: what was measured, by N.
        n: smallest measured N from which on the converted attention is faster than the best
            correct peer with a dense bias; None if there is none.
        text: the same in words.
    """

    sites: tuple[str, ...]
    heads: int
    head_dim: int
    terms: tuple[str, ...]
    rank: int | None
    causal: bool
    cosine: bool
    fixed_n: int | None
    points: tuple[Point, ...]
    n: int | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        lists = {name: list(getattr(self, name)) for name in ("sites", "terms")}
        return {**vars(self), **lists, "points": [point.to_dict() for point in self.points]}


@dataclass(frozen=True)
class BenchmarkReport:
    """Everything that was measured, in one run on one device.

    Attributes:
        device: such as "cpu" or "cuda:0".
        device_name: of the card or the processor.
        dtype: of the models.
        versions: of torch, triton and others.
        threads: of the CPU; None on a card.
        repeats: calls timed per row.
        backend: what computes the converted attention here.
        cases: one per batch of inputs.
        break_even: one per kind of site.
        notes: what the user should know.
        seconds: how long it took.
    """

    device: str
    device_name: str
    dtype: str
    versions: dict[str, str]
    threads: int | None
    repeats: int
    backend: str
    cases: tuple[Case, ...]
    break_even: tuple[BreakEven, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def rows(self, name: str) -> list[Row]:
        """The rows of whole models called `name`, one per case."""
        return [row for case in self.cases for row in case.rows if row.name == name]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **vars(self),
            "cases": [case.to_dict() for case in self.cases],
            "break_even": [one.to_dict() for one in self.break_even],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
