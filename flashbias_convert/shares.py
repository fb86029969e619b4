"""Calls that one process makes alone, or that several share out; the results are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # torch may have been built without it
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def own(count: int, group: ProcessGroup | None) -> range:
    """Which of `count` calls `each` gives to this process: every P-th; all without a group."""
    return range(count) if group is None else range(group.rank(), count, group.size())


def each(work: Sequence[Callable[[], T]], group: ProcessGroup | None) -> list[T]:
    """Results of all calls, in order; see `parallel.spread` for what a group does."""
    if group is None:
        return [call() for call in work]
    from .parallel import spread

    return spread(work, group)
