"""Calls that one process makes alone, or that several share out; the results are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # torch may have been built without it
    from torch.distributed import ProcessGroup

T = TypeVar("T")


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


def own(count: int, group: ProcessGroup | None) -> Sequence[int]:
    """Which of `count` calls that cost the same `each` gives to this process."""
    if group is None:
        return range(count)
    return assigned([1.0] * count, group.size())[group.rank()]


def each(
    work: Sequence[Callable[[], T]],
    group: ProcessGroup | None,
    costs: Sequence[float] | None = None,
) -> list[T]:
    """Results of all calls, in order; see `parallel.spread` for what a group does."""
    if group is None:
        return [call() for call in work]
    from .parallel import spread

    return spread(work, group, costs=costs)
