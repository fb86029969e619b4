"""Builders: functions and modules that make a term from the input of a call.

A plan stores a builder by its name, and the recipe's forward hands it its inputs, so that a file
says which of its terms are made anew in every call, and from what. A builder with weights of its
own is a `BuilderModule`: the plan stores its kind and sizes, the file its weights. Kinds are looked
up among those that are registered; nothing that a file names is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .builder_module import BuilderModule
from .built_terms import (
    axial_rows,
    axial_rows_3d,
    cls_window_table,
    dense,
    distance_table,
    lookup,
    padded_alibi,
    product,
    rounded_alibi,
    window_table,
)
from .decompose.factor_networks import FactorNetworks
from .terms import TERM_KINDS, Alibi, Term


@dataclass(frozen=True)
class Builder:
    """A function that makes a term, and what it takes the place of.

    Attributes:
        make: called with keyword arguments, the inputs of the call.
        replaces: kinds of planned terms that are left out where it is used.
        common: an input that layers of a model may share, a tensor; they share the term, too.
        by_value: other inputs that are tensors, small ones that the layers have copies of.
    """

    make: Callable[..., Term]
    replaces: tuple[str, ...] = ()
    common: str | None = None
    by_value: tuple[str, ...] = ()


BUILDERS: dict[str, Builder] = {
    "product": Builder(product),
    "padded_alibi": Builder(padded_alibi, (Alibi.kind,), "places", ("slopes",)),
    "rounded_alibi": Builder(rounded_alibi, (Alibi.kind,), "places", ("slopes",)),
    "axial_rows": Builder(axial_rows),
    "axial_rows_3d": Builder(axial_rows_3d),
    "cls_window_table": Builder(cls_window_table, common="table"),
    "dense": Builder(dense),
    "distance_table": Builder(distance_table, common="table"),
    "window_table": Builder(window_table, common="table"),
    "lookup": Builder(lookup),
}


def find_builder(name: str) -> Builder:
    """The builder of that name; raises ValueError if there is none."""
    if name not in BUILDERS:
        raise ValueError(f"unknown builder {name!r}; is the file newer?")
    return BUILDERS[name]


def build(name: str, inputs: dict[str, Any]) -> Term:
    """The term that a builder makes of the inputs of a call."""
    return find_builder(name).make(**inputs)


# -- builders with weights ------------------------------------------------------------------

_MODULES: dict[str, type[BuilderModule]] = {FactorNetworks.kind: FactorNetworks}


def register_builder_module(cls: type[BuilderModule]) -> type[BuilderModule]:
    """Let files name this class by its `kind`; a decorator for recipes.

    Raises:
        ValueError: the kind is taken, or cannot be part of the name of a tensor.
    """
    kind = cls.kind
    reserved = (*TERM_KINDS, *BUILDERS, "layout", "made_from")
    if kind in reserved or not kind.isidentifier() or _MODULES.get(kind, cls) is not cls:
        raise ValueError(f"a builder module cannot be called {kind!r}")
    _MODULES[kind] = cls
    return cls


def builder_module(kind: str, config: Mapping[str, Any]) -> BuilderModule:
    """A builder whose weights wait for a state dict.

    Raises:
        ValueError, TypeError: an unknown kind, or sizes that make no sense.
    """
    if kind not in _MODULES:
        raise ValueError(f"unknown kind of builder {kind!r}; is the file newer?")
    return _MODULES[kind].from_config(config)


def module_entries(modules: Mapping[str, BuilderModule]) -> list[dict[str, Any]]:
    """What a plan says of builders with weights, as JSON."""
    return [
        {"name": name, "kind": m.kind, "config": m.config(), "tensors": m.tensors()}
        for name, m in modules.items()
    ]


def check_entry(entry: Mapping[str, Any]) -> None:
    """Raise ValueError unless the tensors of an entry of `module_entries` are those of its sizes.

    Allocates nothing.
    """
    with torch.device("meta"):
        wanted = builder_module(entry["kind"], entry["config"]).tensors()
    if wanted != entry["tensors"]:
        raise ValueError(f"the tensors of {entry['name']!r} are not those of its sizes")


def modules_from_spec(spec: Mapping[str, Any], device: Any = None) -> dict[str, BuilderModule]:
    """The builders with weights of a site, to be filled by a state dict.

    Raises:
        ValueError, TypeError: see `builder_module` and `check_entry`.
    """
    found = {}
    for entry in spec.get("builder_modules", ()):
        check_entry(entry)
        with torch.device(device or "cpu"):
            made = builder_module(entry["kind"], entry["config"])
        found[entry["name"]] = made.requires_grad_(False).eval()
    return found


def with_builders(
    spec: Mapping[str, Any],
    builders: Sequence[str],
    modules: Mapping[str, BuilderModule] | None = None,
    trained: bool = False,
) -> dict[str, Any]:
    """A `ScoreBias.spec` that also says which builders there are, and whether terms are trained."""
    out = dict(spec)
    if trained:
        out["trained"] = True
    if builders:
        out["builders"] = list(builders)
    if modules:
        out["builder_modules"] = module_entries(modules)
    return out
