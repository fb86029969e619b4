"""Where a model adds biases: its sites, their recipes and their owners."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..errors import UsageError
from ..recipe import Recipe, Registry, Site, qualified_name

_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "torch.compile",
    "torch.nn.parallel.distributed.DistributedDataParallel": "DistributedDataParallel",
    "torch.nn.parallel.data_parallel.DataParallel": "DataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FSDP",
    "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule": "FSDP",
    "torch.jit._script.ScriptModule": "torch.jit",
}


@dataclass(frozen=True, eq=False)
class Match:
    """A site, its recipe, and every name of its module, the site's own first."""

    site: Site
    recipe: Recipe
    names: tuple[str, ...]


def find_sites(model: nn.Module, registry: Registry, tokens: int | None) -> Iterator[Match]:
    """Every module that has a recipe, once."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for module, own in names.items():
        recipe = registry.find(module)
        if recipe is not None:
            owner = owner_of(model, own[0], recipe)
            yield Match(Site(own[0], module, model, tokens, owner), recipe, tuple(own))


def find_site(model: nn.Module, name: str, recipe: Recipe, tokens: int | None = None) -> Site:
    """The site called `name`, with its owner; raises AttributeError if there is none."""
    return Site(name, model.get_submodule(name), model, tokens, owner_of(model, name, recipe))


def owner_of(model: nn.Module, name: str, recipe: Recipe) -> nn.Module | None:
    """The nearest module above `name` that makes its bias, if the recipe has owners."""
    while recipe.owners and name:
        name = name.rpartition(".")[0]
        above = model.get_submodule(name)
        if recipe.owners[0].matches(above):
            return above
    return None


def shared_owner(site: Site, recipe: Recipe) -> nn.Module | None:
    """The owner of a site, if the site takes what that makes."""
    return site.owner if site.owner is not None and recipe.shares(site.module) else None


def refuse_wrapped(model: nn.Module) -> None:
    """Raise UsageError if the model, or a part of it, is compiled, scripted or distributed."""
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            wrapper = _WRAPPERS.get(qualified_name(cls))
            if wrapper is not None:
                raise UsageError(
                    f"{f'module {name!r}' if name else 'the model'} is wrapped by {wrapper}",
                    "convert the model first and wrap the result",
                )
