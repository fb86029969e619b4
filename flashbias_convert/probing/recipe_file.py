"""A starting recipe for a class without one: what is known is filled in, the rest says so."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Sequence

from torch import nn

from ..errors import NothingToConvertError, UsageError
from .code_text import (
    WIDTH,
    distribution,
    item,
    number,
    parameters_of,
    raising,
    snake,
    wrapped,
)
from .report import MEANING, Probe, SiteProbe
from .sources import BiasSource, find_source

#: what a human has to decide, by kind
_GUIDANCE = {
    "per key": "read the numbers per key off the model's own bias and return Description(None, "
    "..., exact_terms=(KeyBias(values=...),)), or Alibi(slopes=...) where they are evenly spaced",
    "offset": "compute the bias (H, N, M) by the module's own code; pass index= where the module "
    "has an index matrix",
    "low rank": "compute the bias (*batch, H, N, M) by the module's own code",
    "dense": "compute the bias (*batch, H, N, M) by the module's own code",
    "gated": "return the rows as terms and name a builder, flashbias_convert.builders, that makes "
    "their row_scale from the input of each call",
    "query-dependent": "name a builder, flashbias_convert.builders, that makes the terms from the "
    "queries of each call: Axial where the bias is a sum over two axes",
    "input-dependent": "name a builder, flashbias_convert.builders, that makes the terms from the "
    "input of each call",
    "unknown": "find out what is added to the scores; the prober did not",
}


def recipe_text(probe: Probe, model: nn.Module) -> tuple[str, str]:
    """A Python file that defines `recipe`, and the class that it is about.

    The class is the one with most biased sites among those that no recipe knows. `describe` is
    complete where the bias was found among the module's own tensors; whatever a human must decide
    raises NotImplementedError and says what is missing, so that a plan shows it as a failed site.
    Where all but the forward is there, a plan shows the decisions, and nothing is patched: the
    class says that it is `unfinished`.

    Args:
        probe: of the model.
        model: the same model.

    Raises:
        NothingToConvertError: no attention has a bias.
        UsageError: there is no biased site without a recipe; one that refuses it counts, too.
    """
    if not probe.biased:
        raise NothingToConvertError(
            "no attention of this model has a bias: there is nothing to write a recipe for",
            "an input of another kind may bring one: --inputs",
        )
    open_sites = [s for s in probe.biased if s.recipe is None and not s.refused]
    if not open_sites:
        reasons = dict.fromkeys(s.refused for s in probe.biased if s.refused)
        raise UsageError(
            "there is no biased attention without a recipe, so there is none to write",
            "not converted, says the recipe " + "; ".join(reasons)
            if reasons
            else "convert the model, or look at its sites without --write-recipe",
        )
    chosen = Counter(site.module_class for site in open_sites).most_common(1)[0][0]
    sites = [site for site in open_sites if site.module_class == chosen]
    module = model.get_submodule(sites[0].name)
    return _Writer(sites, module).text(), chosen


class _Writer:
    def __init__(self, sites: Sequence[SiteProbe], module: nn.Module) -> None:
        self.sites, self.site, self.module = sites, sites[0], module
        cls = type(module)
        self.home, self.name = cls.__module__, cls.__qualname__
        self.short = re.sub(r"\W", "", self.name)
        static = self.site.terms is not None and self.site.bias is not None
        self.source: BiasSource | None = None
        if static and self.site.kind != "per key":
            assert self.site.bias is not None
            self.source = find_source(module, self.site.bias)

    def text(self) -> str:
        return "\n".join(
            [*self._docstring(), "", *self._imports(), "", "", *self._class(), "", "",
             *self._describe(), "", "", *self._recipe(), ""]
        )  # fmt: skip

    # -- parts ---------------------------------------------------------------------------

    def _docstring(self) -> list[str]:
        site = self.site
        kinds = Counter((s.kind, s.detail) for s in self.sites)
        lines = [f'"""{self.short}: a starting recipe, to be completed by hand.', ""]
        lines += wrapped(f"Class {self.name} of {self.home}.")
        lines += ["", "What was seen in one pass of the model:", ""]
        for (kind, detail), count in kinds.items():
            what = MEANING[kind] if detail in MEANING.values() else f"{MEANING[kind]}; {detail}"
            lines += item(f"{count} x {kind}: {what}")
        sizes = f"H = {site.heads}, N = {site.n}, M = {site.m}, D = {site.head_dim}"
        lines += item(f"sizes of the first call: {sizes}")
        lines += item(f"what would serve: {site.term or 'no term'}")
        for note in dict.fromkeys(note for s in self.sites for note in s.notes):
            lines += item(note)
        return [*lines, '"""']

    def _imports(self) -> list[str]:
        return [
            "from __future__ import annotations",
            "",
            "from collections.abc import Hashable",
            "from typing import Any",
            "",
            "from torch import Tensor",
            "",
            "from flashbias_convert.patched_attention import PatchedAttention",
            "from flashbias_convert.recipe import Description, Recipe, Site",
        ]

    def _class(self) -> list[str]:
        lines = [
            f"class Patched{self.short}(PatchedAttention):",
            f'    """`{self.short}`; reproduce its quirks instead of correcting them."""',
            "",
            "    # nothing is patched as long as this stands here",
            '    unfinished = "write flashbias_forward"',
            "",
            "    def bias_sources(self) -> tuple[Tensor | Hashable, ...]:",
            "        # whatever describe() reads: the terms are stale once one of these changes",
        ]
        if self.source is not None:
            names = ", ".join(f"self.{name}" for name in self.source.names)
            lines.append(f"        return ({names},)" if len(self.source.names) == 1 else
                         f"        return ({names})")  # fmt: skip
        else:
            lines += raising("        ", "return the tensors and sizes that the bias is made from")
        lines += ["", *self._signature()]
        lines += [f"        # the original forward: {self._where()}"]
        lines += [f"        # {line}" for line in self._steps()]
        return lines + raising("        ", "write the forward with self.score_bias in it")

    def _steps(self) -> list[str]:
        site = self.site
        notes = " ".join(note for s in self.sites for note in s.notes)
        scale = site.scale if isinstance(site.scale, float) else "one number per head"
        call = f"self.score_bias(q, k, v, scale={number(scale)})"
        if "cosine" in notes:
            call = "self.score_bias(q, k, v, scale=..., cosine=True)"
        steps = ["q, k, v as there, shapes (*batch, H, N, D); then, instead of scores and softmax,"]
        steps += [call]
        if "keeps regions apart" in notes:
            steps += ["with the mask of the call: flashbias_convert.masks.attend_windows"]
        if site.causal:
            steps += ["causal, with padding and cache: flashbias_convert.causal.attend_causal"]
        elif "a mask hides keys" in notes:
            steps += ["a mask hides keys: pass key_mask=, or a term; never drop it"]
        return steps

    def _describe(self) -> list[str]:
        site = self.site
        lines = ["def describe(site: Site) -> Description:"]
        if self.source is None:
            lines += ['    """What the module adds to its scores; by its own code."""']
            return lines + raising("    ", _GUIDANCE[site.kind])
        lines += ['    """The bias from the tensors of the module, as it was found there."""']
        lines += ["    module: Any = site.module", *(f"    {x}" for x in self.source.lines)]
        lines += ["    heads, n, m = bias.shape[-3:]", "    return Description("]
        lines += ["        bias=bias,", "        num_heads=heads,", "        n=n,", "        m=m,"]
        lines += [
            f"        head_dim={site.head_dim},  # of the probed model: read it off the module"
        ]
        if self.source.index is not None:
            lines += ["        index=index,"]
        return [*lines, "    )"]

    def _recipe(self) -> list[str]:
        library, version = distribution(self.home)
        lines = [
            f'_MODULE = "{self.home}"',
            "",
            "recipe = Recipe(",
            f'    name="{snake(self.home, self.short)}",',
            f'    title="{self.short} ({library})",',
            f'    classes=(f"{{_MODULE}}.{self.name}",),',
            f'    library="{library}",',
            f'    tested=">={version}",',
            f"    attention=Patched{self.short},",
            "    describe=describe,",
            ")",
        ]
        return [line + ("  # noqa: E501" if len(line) > WIDTH else "") for line in lines]

    # -- details -------------------------------------------------------------------------

    def _signature(self) -> list[str]:
        parameters = parameters_of(type(self.module))
        one_line = f"    def flashbias_forward({', '.join(parameters)}) -> Any:"
        if len(one_line) <= WIDTH:
            return [one_line]
        inside = [f"        {parameter}," for parameter in parameters]
        return ["    def flashbias_forward(", *inside, "    ) -> Any:"]

    def _where(self) -> str:
        try:
            line = inspect.getsourcelines(type(self.module).forward)[1]
        except (OSError, TypeError):
            return self.home
        return f"{self.home}, line {line}"
