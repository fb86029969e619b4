"""A verification for people: a table of sites, and what it comes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table

from ..verification import Comparison, Difference, Verification
from .tables import MAX_ROWS

_Number = Callable[[Difference], float]
#: title, number, from which width of the terminal on
_NUMBERS: tuple[tuple[str, _Number, int], ...] = (
    ("difference\nmax", lambda d: d.difference_max, 0),
    ("difference\nrms", lambda d: d.difference_rms, 100),
    ("rounding\nmax", lambda d: d.rounding_max, 60),
    ("rounding\nrms", lambda d: d.rounding_rms, 100),
    ("largest\nvalue", lambda d: d.largest, 120),
)


def verification_lines(found: Verification, width: int) -> list[RenderableType]:
    """Everything that is worth showing, from the inputs to the verdict.

    Args:
        found: a verification.
        width: columns of the terminal.
    """
    lines: list[RenderableType] = [
        f"{found.samples} samples: {found.inputs}; {found.dtype} on {found.device}, "
        f"rounding against {found.wide_dtype}",
        *(f"note: {note}" for note in found.notes),
        comparison_table([*found.outputs, *found.sites], len(found.outputs), width),
        *_agreement(found),
        *_scores(found),
        verdict(found),
    ]
    return lines


def comparison_table(rows: Sequence[Comparison], outputs: int, width: int) -> Table:
    """One row per output of the model and per site; where there are many, the worst.

    Args:
        rows: the outputs first.
        outputs: how many of the rows are outputs.
        width: columns of the terminal.
    """
    columns = [c for c in _NUMBERS if width >= c[2]]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    table.add_column("output or site", overflow="fold")
    for title, _, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    ends, sites = rows[:outputs], rows[outputs:]
    shown = sites if len(rows) <= MAX_ROWS else sorted(sites, key=_badness, reverse=True)
    shown = shown[: max(0, MAX_ROWS - len(ends))]
    for row in (*ends, *shown):
        numbers = [_number(row.difference, of) for _, of, _ in columns]
        table.add_row(row.name or "(the model)", *numbers, row.verdict)
    if len(shown) < len(sites):
        left_out = len(sites) - len(shown)
        table.caption = f"\nthe worst sites first; {left_out} more are left out, --report has all"
        table.caption_justify = "left"
    return table


def _badness(row: Comparison) -> tuple[bool, float]:
    if row.difference is None or math.isnan(row.difference.error_max):
        return True, math.inf
    allowed = row.difference.allowed_max or math.inf
    return not row.passed, row.difference.error_max / allowed


def _number(difference: Difference | None, of: _Number) -> str:
    return "" if difference is None else format(of(difference), ".2g")


def _agreement(found: Verification) -> list[str]:
    if found.agreement is None:
        return []
    own = "" if found.own_agreement is None else f"{100 * found.own_agreement:.2f} %"
    return [
        f"same choice in {100 * found.agreement:.2f} % of cases "
        f"(the original with itself in {found.wide_dtype}: {own})"
    ]


def _scores(found: Verification) -> list[str]:
    before, after = found.scores.get("original", {}), found.scores.get("converted", {})
    if "top1" in before:
        parts = [
            f"{label} {100 * before[key]:.2f} % -> {100 * after[key]:.2f} %"
            for label, key in (("top-1", "top1"), ("top-5", "top5"))
        ]
        return [f"{', '.join(parts)} of {before['labels']} labelled samples"]
    if "perplexity" in before:
        old, new = (_perplexity(s["perplexity"]) for s in (before, after))
        return [f"perplexity {old} -> {new} over {before['labels']} tokens"]
    return []


def _perplexity(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def verdict(found: Verification) -> str:
    """One line: what the verification came to."""
    if not found.passed:
        return f"not verified: {'; '.join(found.reasons)}"
    limits = [
        f"{name} {value:g}"
        for name, value in (
            ("--max-difference", found.max_difference),
            ("--min-agreement", found.min_agreement),
        )
        if value is not None
    ]
    if found.mode == "exact":
        also = f", and keeps {' and '.join(limits)}" if limits else ""
        return f"verified: exact, within twice the original's own rounding in {found.dtype}{also}"
    if limits:
        return f"verified: approximate, keeps {' and '.join(limits)}"
    return (
        "approximate: everything is finite, and no limit was given "
        "(--max-difference, --min-agreement)"
    )
