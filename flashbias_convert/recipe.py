"""What a recipe is, and how a module finds its recipe.

A recipe is what we know of one architecture, in one file. The registry is the entry-point group
``flashbias_convert.recipes``: qualified class name -> recipe. Walking a model imports only the
recipes of the classes that it meets. A name like ``*.WindowAttention`` stands for classes of that
name in any module, copies of one idea in many repositories: the recipe's `matches` looks at each.
Where several ideas go by one name, a word behind a colon tells them apart (``*.Name:word``).
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from torch import Tensor, nn

from .about import About
from .decompose.pair_times import Pairs
from .errors import UsageError
from .patched_attention import PatchedAttention
from .patched_owner import PatchedOwner
from .terms import Term

logger = logging.getLogger(__name__)

GROUP = "flashbias_convert.recipes"


@dataclass(frozen=True, eq=False)
class Site:
    """A place where a bias is added to attention scores.

    Attributes:
        name: fully qualified module name in `root`; "" for the root itself.
        module: the attention module.
        root: the model.
        tokens: sequence length to plan for where the model leaves it open, or None.
        owner: the nearest module above of the recipe's first kind of owner, or None.
    """

    name: str
    module: nn.Module
    root: nn.Module
    tokens: int | None = None
    owner: nn.Module | None = None

    @property
    def parent(self) -> nn.Module | None:
        """The module that owns this one, or None for the root."""
        if not self.name:
            return None
        return self.root.get_submodule(self.name.rpartition(".")[0])


@dataclass(frozen=True, eq=False)
class Description:
    """What a recipe says about one site.

    Attributes:
        bias: the bias to decompose, shape (*batch, H, N, M), floating point, without masks; None
            when the site has exact terms only.
        num_heads: H.
        n: number of queries per attention call.
        m: number of keys per attention call.
        head_dim: D.
        index: integers (N, M) that look up each cell in a table, if the architecture has them.
        exact_terms: masks and closed forms; they are never decomposed.
        builders: names of the functions that make terms from the input of each call, see
            `flashbias_convert.builders`.
        warnings: what a user should know about this site, one sentence each.
        depends_on_input: the bias is made from the input of each call, and factor networks can
            be fitted to it, see `fit_sites`; `bias` is None, and the recipe needs `observe`.
            Without `builders`, which serve the bias as it is, a site cannot be converted before.
        shared: calls have a batch that shares `bias`, all windows of a map for instance, and no
            mask, also none that comes with a call, no gate and no cosine.
        pairs: what such a bias is made from, so that what calls take can be told; None if that is
            not known.
        not_worth: why method "auto" leaves the site alone, with what was measured; empty where it
            pays. Other methods, calibrations and `force_all` convert it all the same.
    """

    bias: Tensor | None
    num_heads: int
    n: int
    m: int
    head_dim: int
    index: Tensor | None = None
    exact_terms: tuple[Term, ...] = ()
    builders: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    depends_on_input: bool = False
    shared: bool = False
    pairs: Pairs | None = None
    not_worth: str = ""


@dataclass(frozen=True, eq=False)
class Observed:
    """What one call of a site says about a bias that is made from its input.

    The features are those that the patched forward hands to the factor networks.

    Attributes:
        x_q: features of the queries, shape (*batch, N, C).
        x_k: features of the keys, shape (*batch, M, C').
        bias: shape (*batch, H, N, M), without masks.
        key_mask: bool, shape (*batch, M), False for tokens that are padding; None means all count.
            Where N = M, the queries are the same tokens.
        q, k, v: shapes (*batch, H, N, D) and so on; a batch dimension in which the bias has size
            1 may have any size (the rows of triangle attention).
        scale: of the scores.
    """

    x_q: Tensor
    x_k: Tensor
    bias: Tensor
    key_mask: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    scale: float = 1.0


class UnsupportedSite(Exception):
    """Raised by `Recipe.describe` for a site of its class that it cannot convert; says why."""


class LeftAlone(Exception):
    """Raised by `Recipe.describe` for a site that it should not convert; says why."""


class NoBias(LeftAlone):
    """Raised by `Recipe.describe` for a site that adds no bias to its scores; says why."""


@dataclass(frozen=True)
class Owner:
    """A module above the attention that makes biases or masks for all of it.

    Attributes:
        classes: qualified names of its classes; ``*.Name`` for classes of that name anywhere.
        patch: the class whose `flashbias_forward` replaces its forward.
        when: whether a module of the classes makes something; others are left as they are.
        required: whether a site without such a module above is unsupported.
    """

    classes: tuple[str, ...]
    patch: type[PatchedOwner]
    when: Callable[[nn.Module], bool] = lambda _: True
    required: bool = True

    def matches(self, module: nn.Module) -> bool:
        """Whether `module` is of one of the classes, or of a subclass, and makes something."""
        known = any(not _names(cls).isdisjoint(self.classes) for cls in type(module).__mro__)
        return known and self.when(module)


def _always(_: nn.Module) -> bool:
    return True


@dataclass(frozen=True)
class Recipe:
    """What we know of one architecture.

    Attributes:
        name: unique, like "timm_swinv2".
        title: one line for tables: model family and library.
        classes: qualified names of the attention classes that it converts; ``*.Name`` or
            ``*.Name:word`` for classes of that name in any module.
        library: name of the distribution that defines them.
        tested: version specifier that the recipe was tested with, like ">=1.0.20,<1.1".
        attention: the class whose `flashbias_forward` replaces the original forward.
        describe: a site -> its bias and masks; computes them from the module's own code.
        owners: modules above that are patched with the attention. A site without one of the first
            kind is unsupported, unless it is not required; the attention modules of one are
            converted together or not at all.
        shares: whether an attention module takes what its owner makes; of T5's, cross-attention
            does not. Those that do not are left out of "together or not at all".
        observe: for biases that depend on the input: (module, arguments of its forward) -> what a
            fit needs to know of that call.
        about: what a table of supported architectures says of it.
        matches: for ``*.Name``: whether a module of that name looks like what the recipe knows.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    library: str
    tested: str
    attention: type[PatchedAttention]
    describe: Callable[[Site], Description]
    owners: tuple[Owner, ...] = ()
    shares: Callable[[nn.Module], bool] = _always
    observe: Callable[..., Observed] | None = None
    about: About | None = None
    matches: Callable[[nn.Module], bool] = _always

    def knows(self, cls: type) -> bool:
        """Whether `cls` itself, not a base of it, is one of the classes."""
        return not _names(cls).isdisjoint(map(class_of, self.classes))

    @property
    def converts(self) -> bool:
        """Whether it converts anything; others only say why they do not."""
        return self.about is None or not self.about.refused


def qualified_name(cls: type) -> str:
    """`module.QualName` of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def class_of(name: str) -> str:
    """A name of `Recipe.classes` without the word that tells recipes of one name apart."""
    return name.partition(":")[0]


def _names(cls: type) -> set[str]:
    """Under which names a class may be registered."""
    return {qualified_name(cls), f"*.{cls.__name__}"}


@dataclass
class Registry:
    """Finds the recipe of a module.

    Recipes given explicitly come before installed ones.

    Args:
        recipes: additional recipes, for instance from `load_recipe_file`.
    """

    recipes: Iterable[Recipe] = ()
    _explicit: dict[str, Recipe] = field(init=False)
    _installed: dict[str, EntryPoint] = field(init=False)
    _loaded: dict[str, Recipe | None] = field(init=False, default_factory=dict)
    _anywhere: dict[str, list[str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._explicit = {name: r for r in self.recipes for name in r.classes}
        self._installed = {point.name: point for point in entry_points(group=GROUP)}
        for name in dict.fromkeys((*self._explicit, *sorted(self._installed))):
            if name.startswith("*."):
                self._anywhere.setdefault(class_of(name), []).append(name)

    def find(self, module: nn.Module) -> Recipe | None:
        """The recipe for `module`'s class or its nearest base class, or None.

        A module may bring one along, as its attribute `flashbias_recipe`. A recipe for ``*.Name``
        that matches the module is asked only where no class has one.
        """
        brought = getattr(module, "flashbias_recipe", None)
        if isinstance(brought, Recipe):
            return brought
        for cls in type(module).__mro__:
            recipe = self._named(qualified_name(cls))
            if recipe is not None:
                return recipe
        for cls in type(module).__mro__:
            for name in self._anywhere.get(f"*.{cls.__name__}", ()):
                recipe = self._named(name)
                if recipe is not None and recipe.matches(module):
                    return recipe
        return None

    def _named(self, name: str) -> Recipe | None:
        return self._explicit.get(name) or self._load(name)

    def by_name(self, name: str) -> Recipe:
        """The recipe called `name`; raises UsageError if there is none."""
        for recipe in self.all():
            if recipe.name == name:
                return recipe
        known = sorted(r.name for r in self.all())
        near = ", ".join(difflib.get_close_matches(name, known, 5, cutoff=0.0)) or "none"
        hint = f"`flashbias-convert recipes` lists the {len(known)} that are known; nearest: {near}"
        raise UsageError(f"there is no recipe called {name!r}", hint)

    def all(self) -> list[Recipe]:
        """Every recipe that can be imported, explicit ones first, each once."""
        loaded = [self._load(name) for name in sorted(self._installed)]
        candidates = [*self._explicit.values(), *(r for r in loaded if r is not None)]
        return list({r.name: r for r in reversed(candidates)}.values())[::-1]

    def class_names(self) -> list[str]:
        """Qualified names of all classes that have a recipe; imports nothing."""
        return sorted({*self._explicit, *self._installed})

    def labels(self) -> list[str]:
        """Short names of all recipes; imports nothing: those of installed ones are their files'."""
        installed = (p.value.partition(":")[0].rpartition(".")[2] for p in self._installed.values())
        return sorted({*(recipe.name for recipe in self._explicit.values()), *installed})

    def _load(self, class_name: str) -> Recipe | None:
        if class_name not in self._installed:
            return None
        if class_name not in self._loaded:
            try:
                self._loaded[class_name] = self._installed[class_name].load()
            except Exception as error:  # one broken plugin must not break the others
                logger.warning("recipe for %s cannot be imported: %s", class_name, error)
                self._loaded[class_name] = None
        return self._loaded[class_name]


def load_recipe_file(path: str | Path) -> Recipe:
    """Import `recipe` from a Python file (the file is executed).

    The module stays in `sys.modules`, under a name of its own: dataclasses and pickle look there.

    Raises:
        UsageError: no such file, or it does not define `recipe`.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"recipe file {path} does not exist")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"flashbias_recipe_{path.stem.replace('.', '_')}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"recipe file {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        recipe = getattr(module, "recipe", None)
        if not isinstance(recipe, Recipe):
            raise UsageError(f"recipe file {path} does not define `recipe = Recipe(...)`")
    except BaseException:
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before
        raise
    return recipe
