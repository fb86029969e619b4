"""Calls that one process makes alone, or that several share out; the results are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from .assignment import assigned

if TYPE_CHECKING:  # torch may have been built without it
    from torch.distributed import ProcessGroup

T = TypeVar("T")


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
