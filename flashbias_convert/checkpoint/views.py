"""Parts of a file that may be a whole model: training wrappers keep it beside other things."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

_MAX_DEPTH = 3
#: names of averaged weights, which come before the others
_AVERAGED = ("ema", "average")


@dataclass(frozen=True, eq=False)
class View:
    """Some tensors of a file under shortened names.

    Attributes:
        prefix: what was taken off their names, such as ``model.``; "" for the whole file.
        tensors: the tensors.
        rest: names of the tensors that were left out.
    """

    prefix: str
    tensors: dict[str, Tensor]
    rest: tuple[str, ...] = ()

    @property
    def averaged(self) -> bool:
        """Whether its name says that these are averages of weights."""
        return _is_averaged(self.prefix)

    def lies_in(self, other: View) -> bool:
        """Whether these are tensors of another view."""
        return self.prefix.startswith(other.prefix)


def _is_averaged(name: str) -> bool:
    return any(part in name for part in _AVERAGED)


def views(tensors: Mapping[str, Tensor], at_least: int) -> Iterator[View]:
    """The whole file, then what lies under one name (averaged weights first).

    Args:
        tensors: the state dict of a file.
        at_least: how many tensors a view must have.
    """
    yield View("", dict(tensors))
    yield from _inside("", tensors, at_least, _MAX_DEPTH)


def with_owner(tensors: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> View | None:
    """The tensors under the one name that all of `target` lie under, or None."""
    owners = {key.partition(".")[0] for key in target}
    if len(owners) != 1 or not all("." in key for key in target):
        return None
    (owner,) = owners
    return View("", {f"{owner}.{key}": tensor for key, tensor in tensors.items()})


def _inside(
    prefix: str, tensors: Mapping[str, Tensor], at_least: int, depth: int
) -> Iterator[View]:
    owners = Counter(key.partition(".")[0] for key in tensors if "." in key)
    large = [owner for owner, count in owners.items() if count >= at_least]
    for owner in sorted(large, key=lambda name: not _is_averaged(name)):
        start = owner + "."
        own = {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}
        rest = tuple(prefix + key for key in tensors if not key.startswith(start))
        yield View(prefix + start, own, rest)
        if depth > 1:
            for view in _inside(prefix + start, own, at_least, depth - 1):
                yield View(view.prefix, view.tensors, rest + view.rest)
