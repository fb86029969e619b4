"""A benchmark for people: a table of models, one per kind of site, and the break-even."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.table import Table

from ..benchmark import BenchmarkReport, BreakEven, Case, Row, SiteGroup
from ..benchmark.models import ORIGINAL, ORIGINAL_COMPILED
from ..benchmark.peers import SDPA

#: columns of the narrowest verdict that is not cut within a word
_RESULT = 12
_LEGEND = (
    "x: how many times as fast; differences are from the original in eager mode, errors from "
    "float64, of the first sample; dense biases are made beforehand, but their memory counts"
)


@dataclass(frozen=True)
class _Column:
    """A column; it is left out where the terminal has fewer columns than `from_width`."""

    title: str
    cell: Callable[[Row], str]
    from_width: int = 0


def benchmark_lines(report: BenchmarkReport, width: int) -> list[RenderableType]:
    """Everything that is worth showing.

    Args:
        report: what was measured.
        width: columns of the terminal.
    """
    lines: list[RenderableType] = [_header(report), _LEGEND]
    lines += [f"note: {note}" for note in report.notes]
    told: set[str] = set()
    for case in report.cases:
        lines += ["", f"whole model, {case.inputs}", _models(case, report, width)]
        lines += _reasons(case.rows, told)
        lines += [f"note: {note}" for note in case.notes]
        for group in case.sites:
            lines += ["", _site_title(group), _sites(group.rows, report, width)]
            lines += _reasons(group.rows, told)
    if report.break_even:
        lines += ["", _break_even_title(report)]
        lines += [line for one in report.break_even for line in _break_even(one)]
    return lines


def _header(report: BenchmarkReport) -> str:
    known = [name for name in ("torch", "triton") if name in report.versions]
    versions = [f"{name} {report.versions[name]}" for name in known]
    threads = f", {report.threads} threads" if report.threads else ""
    return (
        f"{report.device_name} ({report.device}{threads}), {report.dtype}, {', '.join(versions)}; "
        f"median of up to {report.repeats} calls; the converted attention is {report.backend}"
    )


def _models(case: Case, report: BenchmarkReport, width: int) -> Table:
    columns = [
        _Column("ms\nmedian", _median),
        _Column("ms\n20-80 %", _spread, 110),
        _Column("samples\nper s", lambda r: _number(r.per_second, ".1f"), 110),
        _Column("x original\neager", lambda r: _ratio(r, ORIGINAL)),
        _Column("x original\ncompiled", lambda r: _ratio(r, ORIGINAL_COMPILED), 100),
        _Column("peak\nMiB", lambda r: _memory(r, report), 90),
        _Column("difference\nmax", lambda r: _number(r.difference_max, ".2g"), 70),
    ]
    return _table("", case.rows, columns, width)


def _sites(rows: Sequence[Row], report: BenchmarkReport, width: int) -> Table:
    columns = [
        _Column("ms\nmedian", _median),
        _Column("ms\n20-80 %", _spread, 110),
        _Column("x dense\nSDPA", lambda r: _ratio(r, SDPA)),
        _Column("peak\nMiB", lambda r: _memory(r, report), 90),
        _Column("error\nmax", lambda r: _number(r.difference_max, ".2g"), 70),
    ]
    return _table("", rows, columns, width)


def _table(title: str, rows: Sequence[Row], columns: Sequence[_Column], width: int) -> Table:
    shown = [c for c in columns if width >= c.from_width]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    table.add_column(title, no_wrap=True)
    for column in shown:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("result", overflow="fold", min_width=_RESULT)
    for row in rows:
        table.add_row(row.name, *(column.cell(row) for column in shown), _result(row))
    return table


def _median(row: Row) -> str:
    return "" if row.times is None else format(row.times.median_ms, ".4g")


def _spread(row: Row) -> str:
    return "" if row.times is None else f"{row.times.p20_ms:.4g}-{row.times.p80_ms:.4g}"


def _ratio(row: Row, reference: str) -> str:
    return _number(row.ratios.get(reference), ".2f")


def _memory(row: Row, report: BenchmarkReport) -> str:
    if row.times is None:
        return ""
    return _number(row.peak_mib, ".1f") if report.device.startswith("cuda") else "not measured"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _result(row: Row) -> str:
    if row.status == "measured":
        return row.verdict
    return f"WRONG: {row.verdict}" if row.status == "wrong" else row.status


def _reasons(rows: Sequence[Row], told: set[str]) -> list[str]:
    """Why rows are wrong, failed or missing; those with the same reason together.

    Why rows are not measured is told once in a report.
    """
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.reason and not (row.status == "not measured" and row.reason in told):
            found.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    told |= {row.reason for row in rows}
    return [f"  {'; '.join(names)}: {reason}" for reason, names in found.items()]


def _site_title(group: SiteGroup) -> str:
    shared = len(group.sites) - 1
    which = group.sites[0] or "(the model)"
    alike = f" and {shared} like it" if shared else ""
    batch = " x ".join(map(str, group.batch)) or "1"
    size = f"{group.n}" if group.n == group.m else f"{group.n} x {group.m}"
    kv = "" if group.kv_heads == group.heads else f" ({group.kv_heads} of keys)"
    return (
        f"attention of {which}{alike}: batch {batch}, {group.heads} heads{kv} of "
        f"{group.head_dim}, N = {size}, {_terms(group)}"
    )


def _terms(kind: SiteGroup | BreakEven) -> str:
    extra = [f"rank {kind.rank}"] if kind.rank is not None else []
    extra += ["causal"] if kind.causal else []
    return ", ".join(["+".join(kind.terms) or "no terms", *extra])


def _break_even_title(report: BenchmarkReport) -> str:
    lengths = [point.n for point in report.break_even[0].points]
    span = f"{lengths[0]} to {lengths[-1]}" if lengths else "no length"
    return (
        f"break-even with the best correct dense bias, measured here at powers of two, {span}, "
        "with random terms and the same number of tokens"
    )


def _break_even(one: BreakEven) -> list[str]:
    sites = f"{len(one.sites)} sites" if len(one.sites) > 1 else one.sites[0] or "(the model)"
    what = f"  {sites}, {one.heads} heads of {one.head_dim}, {_terms(one)}: {one.text}"
    if one.fixed_n is None:
        return [what]
    return [what, f"    its own N is always {one.fixed_n}; other lengths are synthetic shapes"]
