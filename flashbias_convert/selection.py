"""Which sites a caller wants: the entries of `include` and `exclude`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from .errors import UsageError


class Choice:
    """Which sites the caller wants; names are looked up, so that thousands cost nothing.

    Args:
        include: names, or "re:" and a pattern for whole names; empty for all sites.
        exclude: the same; wins over `include`.
        names: of all sites.

    Raises:
        UsageError: an entry is no valid pattern, or matches none of `names`.
    """

    def __init__(
        self, include: Iterable[str], exclude: Iterable[str], names: Sequence[str]
    ) -> None:
        self._include, self._exclude = _Entries(_as_list(include)), _Entries(_as_list(exclude))
        for option, entries in (("include", self._include), ("exclude", self._exclude)):
            entry = entries.without_match(names)
            if entry is not None:
                near = difflib.get_close_matches(entry.removeprefix("re:"), names, cutoff=0.3)
                raise UsageError(
                    f"{option} entry {entry!r} matches no site",
                    f"sites are, for instance, {listed(near or names, 3)}",
                )

    def reason_against(self, names: Sequence[str]) -> str | None:
        """Why a site with these names is left alone, or None."""
        entry = self._exclude.matching(names)
        if entry is not None:
            return f"excluded by {entry!r}"
        if self._include and self._include.matching(names) is None:
            return "not among the included sites"
        return None


class _Entries:
    """Names, and patterns for whole names."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._names = {entry for entry in entries if not entry.startswith("re:")}
        self._patterns = [entry for entry in entries if entry.startswith("re:")]

    def __bool__(self) -> bool:
        return bool(self._names or self._patterns)

    def matching(self, names: Sequence[str]) -> str | None:
        """An entry that matches one of `names`."""
        found = [name for name in names if name in self._names]
        found += [p for p in self._patterns if any(_matches(p, name) for name in names)]
        return found[0] if found else None

    def without_match(self, names: Sequence[str]) -> str | None:
        """An entry that matches none of `names`."""
        missing = sorted(self._names.difference(names))
        missing += [p for p in self._patterns if not any(_matches(p, name) for name in names)]
        return missing[0] if missing else None


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern.removeprefix("re:"), name) is not None
    except re.error as error:
        raise UsageError(f"{pattern!r} is not a regular expression: {error}") from error


def _as_list(entries: Iterable[str]) -> list[str]:
    return [entries] if isinstance(entries, str) else list(entries)


def listed(items: Sequence[str], limit: int = 8) -> str:
    """The first few of some names, in words."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return (", ".join(items[:limit]) or "none") + more
