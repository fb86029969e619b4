"""Terms in a state dict: what `save_pretrained`, `torch.save` and others keep of a patched model.

A patched module has its terms among its buffers, with a text that says how to read them. So any
way of saving a model keeps a conversion, without a plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..builders import check_entry
from ..errors import CheckpointError
from ..inspection import library_versions
from ..options import DecomposeOptions
from ..plan import Plan, SitePlan
from ..recipe import Recipe, Registry
from ..swap import SUBMODULE
from ..terms import ScoreBias

_LAYOUT = f"{SUBMODULE}.layout"
_REASON = "its terms are in the state dict"


def split_terms(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a state dict, and the terms that patched modules have among them."""
    owners = tuple(key.removesuffix("layout") for key in _layouts(tensors).values())
    terms = {key: t for key, t in tensors.items() if owners and key.startswith(owners)}
    return {key: t for key, t in tensors.items() if key not in terms}, terms


def sites_of(terms: Iterable[str]) -> list[str]:
    """Sites that have terms."""
    return list(_layouts(terms))


def stale_sites(terms: Mapping[str, Tensor]) -> list[str]:
    """Sites whose weights had changed since they were converted when the model was saved."""
    return [site for site, key in _layouts(terms).items() if not terms[key].any()]


def plan_of_terms(
    terms: Mapping[str, Tensor],
    path: str | Path,
    model: nn.Module | None = None,
    recipes: Iterable[Recipe] = (),
) -> Plan:
    """The plan that terms in a state dict stand for: what is patched, but not why.

    Args:
        terms: the second part of `split_terms`.
        path: where they came from, for messages.
        model: the original model, to find recipes for; without it they stay unnamed.
        recipes: recipes beside the installed ones.

    Raises:
        CheckpointError: damaged or stale terms, or a site that the model lacks.
    """
    stale = stale_sites(terms)
    if stale:
        raise CheckpointError(
            f"the weights of {stale[0]!r} in {path} were changed after they were converted",
            f"convert it again: flashbias-convert {path}",
        )
    registry = Registry(tuple(recipes))
    sites = []
    for site, key in _layouts(terms).items():
        recipe = "" if model is None else _recipe(site, model, registry, path)
        spec = _spec(terms, key, path)
        heads = int(spec["num_heads"])
        sites.append(SitePlan(site, recipe, "patched", _REASON, heads=heads, spec=spec))
    return Plan(DecomposeOptions(), sites, versions=library_versions())


def _layouts(tensors: Iterable[str]) -> dict[str, str]:
    """Site -> key of the text that says how to read its terms."""
    return {
        key.removesuffix(_LAYOUT).removesuffix("."): key
        for key in tensors
        if key == _LAYOUT or key.endswith("." + _LAYOUT)
    }


def _recipe(site: str, model: nn.Module, registry: Registry, path: str | Path) -> str:
    try:
        recipe = registry.find(model.get_submodule(site))
    except AttributeError as error:
        raise CheckpointError(
            f"{path} holds terms of {site!r}, which the model does not have",
            "is this the right architecture?",
        ) from error
    if recipe is None:
        raise CheckpointError(f"no recipe is known for {site!r} of {path}", "pass it in recipes=")
    return recipe.name


def _spec(terms: Mapping[str, Tensor], key: str, path: str | Path) -> dict[str, Any]:
    """`ScoreBias.spec` from the text and from the shapes of the tensors."""
    start = key.removesuffix("layout")
    own = {k.removeprefix(start): t for k, t in terms.items() if k.startswith(start) and k != key}
    own.pop("made_from", None)
    try:
        layout = json.loads(bytes(terms[key].tolist()))
        entries = [_entry(entry, own) for entry in layout["terms"]]
        spec = {**layout, "num_heads": int(layout["num_heads"]), "terms": entries}
        built = [_module_entry(entry, own) for entry in layout.get("builder_modules", ())]
        if built:
            spec["builder_modules"] = built
        held = {f"{e['name']}.{name}" for e in (*entries, *built) for name in e["tensors"]}
        if held != own.keys() or ScoreBias.layout(spec).encode() != bytes(terms[key].tolist()):
            raise ValueError("its tensors are not those of its layout")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{start[:-1]} in {path} is damaged: {error}") from error
    return spec


def _entry(entry: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "name": entry["name"],
        "kind": entry["kind"],
        "static": {k: v for k, v in entry.items() if k not in ("name", "kind")},
        "tensors": _tensors(entry["name"], own),
    }


def _module_entry(entry: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
    """An entry of `builders.module_entries`."""
    found = {key: entry[key] for key in ("name", "kind", "config")}
    found["tensors"] = _tensors(entry["name"], own)
    check_entry(found)
    return found


def _tensors(name: str, own: Mapping[str, Tensor]) -> dict[str, Any]:
    start = name + "."
    return {
        key.removeprefix(start): {
            "shape": list(t.shape),
            "dtype": str(t.dtype).removeprefix("torch."),
        }
        for key, t in own.items()
        if key.startswith(start)
    }
