"""Which of some processes makes which of some calls."""

from __future__ import annotations

from collections.abc import Sequence


def assigned(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Which calls each of some processes makes, in its order: the longest call first.

    Each call goes to the process that has least to do so far, the first of equals; so no process
    has more than 4/3 of what the best order gives (Graham, 1969). Equal costs give process r the
    calls r, r + P, ...

    Args:
        costs: of the calls, in any unit; only their ratios matter.
        parts: how many processes.
    """
    found: list[list[int]] = [[] for _ in range(parts)]
    busy = [0.0] * parts
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        # with as much to do, the one with fewer calls: costs of zero are shared out, too
        least = min(range(parts), key=lambda part: (busy[part], len(found[part])))
        found[least].append(at)
        busy[least] += costs[at]
    return found
