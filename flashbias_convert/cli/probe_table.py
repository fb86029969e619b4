"""What a prober found, for people: one row per site, or per group of alike sites."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from rich import box
from rich.console import RenderableType
from rich.table import Table

from ..probing import FREE, MEANING, Probe, SiteProbe
from .tables import MAX_ROWS


@dataclass(frozen=True)
class _Column:
    """A column; left out where the terminal is narrower than `from_width`."""

    title: str
    cell: Callable[[Sequence[SiteProbe]], str]
    number: bool = False
    from_width: int = 0


def _size(sites: Sequence[SiteProbe]) -> str:
    site = sites[0]
    return str(site.n) if site.n == site.m else f"{site.n}x{site.m}"


def _ranks(sites: Sequence[SiteProbe]) -> str:
    ranks = [rank for site in sites for rank in site.ranks or ()]
    return f"{mean(ranks):.1f}/{max(ranks)}" if ranks else ""


def _error(sites: Sequence[SiteProbe]) -> str:
    errors = [error for site in sites for error in site.attention_errors or ()]
    return f"{max(errors):.3f}" if errors else ""


def _bytes(sites: Sequence[SiteProbe]) -> str:
    site = sites[0]
    if site.kind in FREE or not site.term:
        return ""
    return f"{_short(site.dense_bytes)} -> {_short(site.term_bytes)}"


def _short(size: int) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size = size / 1000  # type: ignore[assignment]
    return f"{size:.3g} GB"


def _recipe(site: SiteProbe) -> str:
    """Its name; a note says why a site is refused."""
    if site.recipe or site.kind in FREE:
        return site.recipe or ""
    return "refused" if site.refused else "none"


_COLUMNS = (
    _Column("site", lambda s: _name(s)),
    _Column("N", _size, number=True),
    _Column("H", lambda s: str(s[0].heads), number=True, from_width=100),
    _Column("seen in", lambda s: s[0].seen, from_width=120),
    _Column("kind", lambda s: s[0].kind),
    _Column("more precisely", lambda s: s[0].detail, from_width=140),
    _Column("term", lambda s: s[0].term, from_width=60),
    _Column("rank\nmean/max", _ranks, number=True, from_width=80),
    _Column("attn\nerror", _error, number=True, from_width=100),
    _Column("bias of a call\nnow -> terms", _bytes, number=True, from_width=100),
    _Column("recipe", lambda s: _recipe(s[0]), from_width=80),
)


def probe_lines(found: Probe, width: int, verbose: bool) -> list[RenderableType]:
    """A table, the notes, and what it comes to.

    Args:
        found: what was found.
        width: columns of the terminal.
        verbose: show the notes of every site.
    """
    lines: list[RenderableType] = []
    if found.sites:
        lines.append(_table(found, width))
    lines += [f"note: {note}" for note in found.notes]
    lines += _site_notes(found, verbose)
    return [*lines, _summary(found)]


def _table(found: Probe, width: int) -> Table:
    groups = _groups(found.sites)
    columns = [c for c in _COLUMNS if width >= c.from_width]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(
            column.title, justify="right" if column.number else "left", overflow="fold"
        )
    for group in groups[:MAX_ROWS]:
        table.add_row(*(column.cell(group) for column in columns))
    caption = [f"rank: for {found.energy:.4g} of the energy; errors: of the largest head"]
    if len(groups) > MAX_ROWS:
        caption.append(f"{len(groups) - MAX_ROWS} more rows are left out; --report FILE has all")
    table.caption = "\n".join(["", *caption])
    table.caption_justify = "left"
    return table


def _groups(sites: Sequence[SiteProbe]) -> list[list[SiteProbe]]:
    if len(sites) <= MAX_ROWS:
        return [[site] for site in sites]
    groups: dict[tuple[object, ...], list[SiteProbe]] = {}
    for s in sites:
        pattern = re.sub(r"\d+", "*", s.site)
        groups.setdefault((pattern, s.kind, s.term, s.n, s.m, s.heads), []).append(s)
    return list(groups.values())


def _name(sites: Sequence[SiteProbe]) -> str:
    if len(sites) == 1:
        return sites[0].site or "(the model)"
    return f"{re.sub(r'[0-9]+', '*', sites[0].site)} ({len(sites)})"


def _site_notes(found: Probe, verbose: bool) -> list[str]:
    """Each note once, with the sites that it is about."""
    if verbose:
        return [f"{s.site or '(the model)'}: {'; '.join(s.notes)}" for s in found.sites if s.notes]
    about: dict[str, list[str]] = {}
    for site in found.sites:
        for note in site.notes:
            about.setdefault(note, []).append(site.site or "(the model)")
    return [
        f"{note} [{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}]"
        for note, names in about.items()
    ]


def _summary(found: Probe) -> str:
    if not found.sites:
        return "no attention was seen"
    if not found.biased:
        known = sorted({site.recipe for site in found.sites if site.recipe is not None})
        if known:
            calls = f"{len(found.sites)} attention calls, which add zeros or nothing"
            return f"{calls}; with other weights they would be converted by {', '.join(known)}"
        return f"{len(found.sites)} attention calls, no bias: there is nothing to convert"
    kinds = [
        f"{count} {kind} ({MEANING[kind]})"
        for kind, count in found.counts().items()
        if kind not in FREE
    ]
    return f"{len(found.biased)} of {len(found.sites)} attention calls have a bias: " + ", ".join(
        kinds
    )
