"""What a user should know about a site, whatever is decided."""

from __future__ import annotations

import importlib.metadata
from functools import cache

from packaging.specifiers import SpecifierSet
from torch import nn

from ..recipe import Recipe
from .finding import Match


def cautions(match: Match) -> tuple[str, ...]:
    """One sentence each."""
    found = [_version_warning(match.recipe), _alias_warning(match), _hook_warning(match)]
    return tuple(warning for warning in found if warning is not None)


def _version_warning(recipe: Recipe) -> str | None:
    version = _version_of(recipe.library)
    if version is None or SpecifierSet(recipe.tested).contains(version, prereleases=True):
        return None
    return f"recipe {recipe.name} was tested with {recipe.library}{recipe.tested}, not {version}"


@cache
def _version_of(library: str) -> str | None:
    """The installed version; asked once, because the answer is parsed anew each time."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _alias_warning(match: Match) -> str | None:
    if len(match.names) == 1:
        return None
    others = ", ".join(repr(name) for name in match.names[1:])
    return f"the same module is also used as {others}"


def _hook_warning(match: Match) -> str | None:
    attention = match.recipe.attention
    children = {n: c for n, c in match.site.module._modules.items() if c is not None}
    silent = {n: list(children[n].modules()) for n in attention.bypassed if n in children}
    silent |= {n: [children[n]] for n in attention.taken_apart if n in children}
    hooked = [name for name, modules in silent.items() if any(map(_has_hooks, modules))]
    if not hooked:
        return None
    return f"hooks on {', '.join(hooked)} do not run in a patched forward, which does not call them"


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)
