"""Recipes that say why attention of some classes is not converted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from .about import About
from .patched_attention import PatchedAttention
from .recipe import LeftAlone, NoBias, Recipe, Site, UnsupportedSite


class NeverPatched(PatchedAttention):
    """Stands in the recipes of classes that are not converted; no module ever has it."""

    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:
        return ()


def refused(
    *,
    name: str,
    title: str,
    classes: Sequence[str],
    library: str,
    tested: str,
    models: str,
    reason: str,
    impossible: bool = True,
    when: Callable[[Site], bool] = lambda _: True,
    matches: Callable[[nn.Module], bool] = lambda _: True,
    with_what: str = "",
) -> Recipe:
    """A recipe whose sites are listed in every plan, with the reason, and stay as they are.

    Args:
        name, title, classes, library, tested: see `Recipe`.
        models: see `About`.
        reason: why, as a plan says it.
        impossible: the sites are unsupported; otherwise left alone, since nothing would be gained.
        when: whether the reason holds for a site; others add no bias, and are left alone.
        matches: see `Recipe`.
        with_what: it was tested with; see `About.tested`.
    """

    def describe(site: Site) -> NoReturn:
        if not when(site):
            raise NoBias("it has no relative positions")
        raise (UnsupportedSite if impossible else LeftAlone)(reason)

    said = f"{'unsupported' if impossible else 'left alone'}: {reason}"
    about = About(models, refused=said, tested=with_what)
    fields: dict[str, Any] = {"name": name, "title": title, "library": library, "tested": tested}
    return Recipe(
        classes=tuple(classes), attention=NeverPatched, describe=describe, about=about,
        matches=matches, **fields,
    )  # fmt: skip
