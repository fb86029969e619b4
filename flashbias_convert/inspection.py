"""A dry run: walk a model, find its biased attention sites, and plan what to do with each."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from packaging.specifiers import SpecifierSet
from torch import nn

from . import __version__
from .decompose import Decomposition, decompose
from .errors import FlashBiasError, UsageError
from .modules import with_builders
from .no_site import nothing_found
from .options import DecomposeOptions, Method
from .plan import Plan, SitePlan
from .recipe import Description, LeftAlone, Recipe, Registry, Site, UnsupportedSite, qualified_name
from .selection import Choice
from .swap import original_class, owner_refusal, refusal
from .terms import ScoreBias

if TYPE_CHECKING:  # torch may have been built without it
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]

#: why a site with a dynamic bias is left alone
NEEDS_FIT = "its bias depends on the input: fit factor networks to it, flashbias-convert fit"

_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "torch.compile",
    "torch.nn.parallel.distributed.DistributedDataParallel": "DistributedDataParallel",
    "torch.nn.parallel.data_parallel.DataParallel": "DataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FSDP",
    "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule": "FSDP",
    "torch.jit._script.ScriptModule": "torch.jit",
}


def inspect_model(
    model: nn.Module,
    *,
    energy: float = 0.99,
    method: Method = "auto",
    max_rank: int | None = None,
    max_attention_error: float = 0.25,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    recipes: Iterable[Recipe] = (),
    target: str | None = None,
    tokens: int | None = None,
    fill: bool = True,
    diagonal: bool = False,
    force_all: bool = False,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> Plan:
    """Plan the conversion of a model; nothing is changed.

    A model that is patched already is planned anew, from its weights.

    Args:
        model: any model whose weights are loaded.
        energy, method, max_rank, max_attention_error, target, tokens, fill, diagonal, force_all:
            see `DecomposeOptions`.
        include: names of sites to convert, exact, or ``re:PATTERN`` matched against the whole
            name; nothing means all.
        exclude: names of sites to leave alone, in the same form; wins over `include`.
        recipes: recipes to use before the installed ones.
        progress: called with (done, total, name) after each site.
        group: processes that share the sites out, each with the same model; all of them call this
            with the same options and get the same plan, which does not depend on their number.
            ``torch.distributed.group.WORLD`` for all. Default: this process does everything.

    Returns:
        A plan with one entry for every site that a recipe matches.

    Raises:
        NothingToConvertError: no module of the model has a recipe.
        UsageError: options that make no sense, an entry of `include` or `exclude` that matches no
            site, a model that is wrapped, or one whose weights are on the meta device.
    """
    options = DecomposeOptions(
        energy=energy,
        method=method,
        max_rank=max_rank,
        max_attention_error=max_attention_error,
        target=target,
        fill=fill,
        diagonal=diagonal,
        force_all=force_all,
        tokens=tokens,
    )
    refuse_wrapped(model)
    registry = Registry(tuple(recipes))
    matches = list(_find_sites(model, registry, tokens))
    if not matches:
        raise nothing_found(model, registry)
    names = [name for match in matches for name in match.names]
    chosen = Choice(include, exclude, names)
    with leave_no_trace(model):
        if group is None:
            plans = []
            for match in matches:
                plans.append(_plan_site(match, options, chosen.reason_against(match.names)))
                if progress is not None:
                    progress(len(plans), len(matches), match.site.name)
        else:
            plans = _plan_together(matches, options, chosen, progress, group)
    owners = [shared_owner(match.site, match.recipe) for match in matches]
    return Plan(options, together(owners, plans), versions=library_versions())


# -- finding sites -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Match:
    """A site, its recipe, and every name of its module, the site's own first."""

    site: Site
    recipe: Recipe
    names: tuple[str, ...]


def _find_sites(model: nn.Module, registry: Registry, tokens: int | None) -> Iterator[_Match]:
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for module, own in names.items():
        recipe = registry.find(module)
        if recipe is not None:
            owner = owner_of(model, own[0], recipe)
            yield _Match(Site(own[0], module, model, tokens, owner), recipe, tuple(own))


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


# -- planning one site ---------------------------------------------------------------------


def _plan_site(match: _Match, options: DecomposeOptions, against: str | None) -> SitePlan:
    site, recipe = match.site, match.recipe
    plan = SitePlan(site.name, recipe.name, "left alone", against or "", warnings=_warnings(match))
    if against is not None:
        return plan
    reason = refusal(site.module) or _own_forward(site.module, recipe) or _no_owner(match)
    if reason is not None:
        return replace(plan, status="unsupported", reason=reason)
    _refuse_meta(site)
    try:
        description = recipe.describe(site)
        plan = _with_sizes(plan, description)
        return _decide(plan, description, options)
    except LeftAlone as error:
        return replace(plan, reason=str(error))
    except UnsupportedSite as error:
        return replace(plan, status="unsupported", reason=str(error))
    except UsageError:
        raise  # an option that suits no site at all
    except FlashBiasError as error:
        return replace(plan, status="failed", reason=str(error))
    except Exception as error:  # one broken site must not stop the others
        logger.debug("site %s failed", site.name, exc_info=True)
        return replace(plan, status="failed", reason=f"{type(error).__name__}: {error}")


def _plan_together(
    matches: Sequence[_Match],
    options: DecomposeOptions,
    chosen: Choice,
    progress: Progress | None,
    group: ProcessGroup,
) -> list[SitePlan]:
    """Every process plans some of the sites, and gets the plans of the others."""
    from .parallel import spread

    def plan(match: _Match) -> SitePlan:
        made = _plan_site(match, options, chosen.reason_against(match.names))
        return replace(made, bias=None if made.bias is None else made.bias.to("cpu"))

    def done(count: int) -> None:
        if progress is not None:
            at = min(count * group.size(), len(matches))
            progress(at, len(matches), matches[at - 1].site.name)

    plans = spread([partial(plan, match) for match in matches], group, done=done)
    devices = [next((p.device for p in m.site.module.parameters()), None) for m in matches]
    return [
        replace(made, bias=None if made.bias is None else made.bias.to(device))
        for made, device in zip(plans, devices, strict=True)
    ]


def _own_forward(module: nn.Module, recipe: Recipe) -> str | None:
    """A subclass with a forward of its own computes something that the recipe does not know."""
    for cls in original_class(module).__mro__:
        if recipe.knows(cls):
            return None
        if "forward" in vars(cls):
            return f"its class {cls.__name__} overrides the forward that the recipe replaces"
    return None


def _no_owner(match: _Match) -> str | None:
    """Why the owner of a site stands in the way, or None."""
    if not match.recipe.owners:
        return None
    if match.site.owner is None:
        if not match.recipe.owners[0].required:
            return None
        names = [cls.rpartition(".")[2] for cls in match.recipe.owners[0].classes]
        return f"its bias is made by a {' or '.join(names)}, which is not part of this model"
    reason = owner_refusal(match.site.owner)
    return reason and f"its {original_class(match.site.owner).__name__}: {reason}"


def shared_owner(site: Site, recipe: Recipe) -> nn.Module | None:
    """The owner of a site, if the site takes what that makes."""
    return site.owner if site.owner is not None and recipe.shares(site.module) else None


def together(owners: Sequence[nn.Module | None], plans: Sequence[SitePlan]) -> list[SitePlan]:
    """Leave the sites of an owner alone unless all of them can be patched.

    They share what their owner makes: while one needs the dense bias, it is made for all.

    Args:
        owners: `shared_owner` of each site.
        plans: one per site.
    """
    lacking: dict[nn.Module, str] = {}
    for owner, plan in zip(owners, plans, strict=True):
        if owner is not None and plan.status != "patched":
            lacking.setdefault(owner, plan.name)
    done = []
    for owner, plan in zip(owners, plans, strict=True):
        culprit = lacking.get(owner) if owner is not None else None
        if culprit is not None and plan.status == "patched":
            reason = f"shares its bias with {culprit!r}, which is not converted"
            plan = replace(
                plan, status="left alone", reason=reason, spec=None, bias=None, modules=None
            )
        done.append(plan)
    return done


def _refuse_meta(site: Site) -> None:
    tensors = [*site.module.parameters(), *site.module.buffers()]
    if any(t.is_meta for t in tensors):
        raise UsageError(
            f"the weights of {site.name!r} are on the meta device", "load the weights first"
        )


def _with_sizes(plan: SitePlan, description: Description) -> SitePlan:
    return replace(
        plan,
        n=description.n,
        m=description.m,
        heads=description.num_heads,
        head_dim=description.head_dim,
        warnings=plan.warnings + description.warnings,
    )


def _decide(plan: SitePlan, description: Description, options: DecomposeOptions) -> SitePlan:
    if description.depends_on_input:
        return replace(plan, reason=NEEDS_FIT)
    result = Decomposition(ScoreBias((), description.num_heads), ())
    if description.bias is not None:
        result = decompose(description.bias, options, name=plan.name, index=description.index)
    plan = replace(plan, decisions=result.decisions)
    if result.left_alone is not None:
        return replace(plan, status="left alone", reason=result.left_alone)
    bias = result.bias + ScoreBias(description.exact_terms, description.num_heads)
    return replace(
        plan,
        status="patched",
        reason=_summary(result, description),
        spec=with_builders(bias.spec(), description.builders),
        bias=bias,
    )


def _summary(result: Decomposition, description: Description) -> str:
    """What was chosen, in one line: "low_rank in 5 heads (rank 3 to 12), regions"."""
    parts = []
    for term, count in Counter(d.term for d in result.decisions).items():
        ranks = [d.rank for d in result.decisions if d.term == term and d.rank is not None]
        rank = f" (rank {min(ranks)} to {max(ranks)})" if ranks else ""
        what = "no term needed" if term == "none" else term
        parts.append(f"{what} in {count} head{'s' if count > 1 else ''}{rank}")
    parts += [term.kind for term in description.exact_terms]
    parts += [f"{name} in each call" for name in description.builders]
    return ", ".join(parts) or "no bias"


# -- warnings ------------------------------------------------------------------------------


def _warnings(match: _Match) -> tuple[str, ...]:
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


def _alias_warning(match: _Match) -> str | None:
    if len(match.names) == 1:
        return None
    others = ", ".join(repr(name) for name in match.names[1:])
    return f"the same module is also used as {others}"


def _hook_warning(match: _Match) -> str | None:
    hooked = [
        name
        for name in match.recipe.attention.bypassed
        for child in [match.site.module._modules.get(name)]
        if child is not None and any(map(_has_hooks, child.modules()))
    ]
    if not hooked:
        return None
    return f"hooks on {', '.join(hooked)} do not run in a patched forward, which does not call them"


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


# -- surroundings --------------------------------------------------------------------------


def library_versions() -> dict[str, str]:
    """Versions of this package, Python and the libraries that matter; imports none of them."""
    versions = {"flashbias-convert": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "timm", "transformers", "torchvision"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@contextmanager
def leave_no_trace(model: nn.Module) -> Iterator[None]:
    """No gradients, autocast or inference tensors inside; random states as before after."""
    devices = {t.device for t in [*model.parameters(), *model.buffers()]}
    cuda = [device.index for device in devices if device.type == "cuda"]
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        for kind in {"cpu"} | {device.type for device in devices if device.type == "cuda"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
