"""Tables for people: one row per site, or per group of alike sites where there are many."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from rich import box
from rich.table import Table

from ..decompose.decision import HeadDecision
from ..plan import Plan, SitePlan

#: more sites than this are grouped; more groups than this are cut
MAX_ROWS = 40
_NARROWEST_NAME = 12
_NARROWEST_REASON = 20


@dataclass(frozen=True)
class _Row:
    """Sites that are shown as one."""

    name: str
    sites: Sequence[SitePlan]

    @property
    def first(self) -> SitePlan:
        return self.sites[0]

    def decisions(self) -> list[HeadDecision]:
        return [d for site in self.sites for d in site.decisions]

    def over_heads(
        self, fold: Callable[[list[float]], float], of: Callable[[HeadDecision], float], form: str
    ) -> str:
        """A number over all heads, formatted; "" where nothing was decomposed."""
        values = [of(d) for d in self.decisions()]
        return format(fold(values), form) if values else ""

    def rank(self) -> str:
        ranks = [rank for site in self.sites for rank in site.ranks()]
        return f"{mean(ranks):.1f}/{max(ranks)}" if ranks else ""

    def gain(self) -> str:
        """That of the site that gains least."""
        gains = [site.gain for site in self.sites if site.gain]
        return f"{min(gains):.1f}x" if gains else ""

    def reason(self) -> str:
        others = len({site.reason for site in self.sites}) - 1
        return self.first.reason + (f" (and {others} more)" if others else "")


def _root_mean_square(values: Iterable[float]) -> float:
    return math.sqrt(mean(v * v for v in values))


@dataclass(frozen=True)
class _Column:
    """A column; it is left out where the terminal has fewer columns than `from_width`."""

    title: str
    cell: Callable[[_Row], str]
    number: bool = True
    from_width: int = 0


_COLUMNS = (
    _Column("site", lambda r: r.name, number=False),
    _Column("N", lambda r: _size(r.first)),
    _Column("H", lambda r: str(r.first.heads or ""), from_width=100),
    _Column("terms", lambda r: "+".join(_carriers(r.first)), number=False, from_width=80),
    _Column("rank\nmean/max", _Row.rank, from_width=60),
    _Column("energy\n%", lambda r: r.over_heads(min, lambda d: 100 * d.energy, ".2f")),
    _Column(
        "logit\nmax",
        lambda r: r.over_heads(max, lambda d: d.logit_error_max, ".2g"),
        from_width=100,
    ),
    _Column(
        "logit\nrms",
        lambda r: r.over_heads(_root_mean_square, lambda d: d.logit_error_rms, ".2g"),
        from_width=100,
    ),
    _Column(
        "attn\nerror",
        lambda r: r.over_heads(max, lambda d: d.attention_error, ".3f"),
        from_width=60,
    ),
    _Column("gain", _Row.gain, from_width=100),
    _Column("decision", lambda r: r.first.status, number=False),
    _Column("reason", _Row.reason, number=False, from_width=140),
)


def _carriers(site: SitePlan) -> tuple[str, ...]:
    return (*site.terms(), *site.builder_modules())


def _size(site: SitePlan) -> str:
    if not site.n:
        return ""
    return str(site.n) if site.n == site.m else f"{site.n}x{site.m}"


def site_table(plan: Plan, width: int) -> Table:
    """The sites of a plan.

    Args:
        plan: what was decided.
        width: columns of the terminal; a narrow one gets fewer columns.
    """
    rows = _rows(plan.sites)
    columns = [c for c in _COLUMNS if width >= c.from_width]
    cells = [[column.cell(row) for column in columns] for row in rows[:MAX_ROWS]]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for column, own in zip(columns, _widths(columns, cells, width), strict=True):
        justify: Literal["left", "right"] = "right" if column.number else "left"
        table.add_column(column.title, justify=justify, width=own, overflow="fold")
    for row_cells in cells:
        table.add_row(*row_cells)
    caption = ["energy: of the lowest head; errors: of the largest head, rms over all heads"]
    if any(c.title == "gain" for c in columns) and any(row.gain() for row in rows):
        caption.append(
            "gain: expected of the attention on a Hopper card, over a dense bias in torch's SDPA"
        )
    if len(rows) < len(plan.sites):
        caption.append(f"{len(plan.sites)} sites, alike ones in one row (* is any number)")
    if len(rows) > MAX_ROWS:
        caption.append(f"{len(rows) - MAX_ROWS} more rows are left out; --report FILE has all")
    table.caption = "\n".join(["", *caption])
    table.caption_justify = "left"
    return table


def _widths(columns: Sequence[_Column], cells: Sequence[list[str]], width: int) -> list[int]:
    """Every column as wide as its text, but the name and the reason: they share what is left."""
    texts = zip(*([c.title for c in columns], *cells), strict=True)
    widths = [max(len(line) for text in column for line in text.split("\n")) for column in texts]
    left = width - 2 * (len(columns) - 1) - sum(widths[1:])
    if columns[-1].title != "reason":
        return [min(widths[0], max(left, _NARROWEST_NAME)), *widths[1:]]
    left += widths[-1]
    name = min(widths[0], max(left - _NARROWEST_REASON, _NARROWEST_NAME))
    reason = min(widths[-1], max(left - name, _NARROWEST_REASON))
    return [name, *widths[1:-1], reason]


def _rows(sites: Sequence[SitePlan]) -> list[_Row]:
    if len(sites) <= MAX_ROWS:
        return [_Row(site.name or "(the model)", (site,)) for site in sites]
    groups: dict[tuple[object, ...], list[SitePlan]] = {}
    for site in sites:
        pattern = re.sub(r"\d+", "*", site.name)
        key = (pattern, site.n, site.m, site.heads, site.terms(), site.status)
        groups.setdefault(key, []).append(site)
    return [
        _Row(f"{key[0]} ({len(own)})" if len(own) > 1 else own[0].name, own)
        for key, own in groups.items()
    ]


def notes(plan: Plan) -> list[str]:
    """Why sites were not patched, and warnings: each text once, with the sites it is about."""
    about: dict[str, list[str]] = {}
    for site in plan.sites:
        if site.status != "patched":
            about.setdefault(f"{site.status}: {site.reason}", []).append(site.name)
        for warning in site.warnings:
            about.setdefault(f"warning: {warning}", []).append(site.name)
    return [f"{text} [{_names(names)}]" for text, names in about.items()]


def reasons(plan: Plan) -> list[str]:
    """One line per site: what was decided, and why."""
    return [f"{site.name or '(the model)'}: {site.status}: {site.reason}" for site in plan.sites]


def _names(names: Sequence[str], limit: int = 3) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def summary(plan: Plan, *, dry_run: bool = False) -> str:
    """One line: how many sites ended how, and the ranks."""
    verb = "would be converted" if dry_run else "converted"
    parts = [f"{len(plan.patched)} of {len(plan.sites)} sites {verb}"]
    parts += [f"{n} {status}" for status, n in plan.counts().items() if status != "patched"]
    ranks = [rank for site in plan.patched for rank in site.ranks()]
    if ranks:
        parts.append(f"rank {mean(ranks):.1f} on average, {max(ranks)} at most")
    return ", ".join(parts)
