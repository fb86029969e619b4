"""Run a model twice, and find out what it adds to its attention scores."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..inputs import Batch, as_inputs
from ..inspection import leave_no_trace, refuse_wrapped
from ..patched_attention import PatchedAttention
from ..recipe import Recipe, Registry, qualified_name
from .calls import AttentionCall
from .changed import alike, changed
from .classify import classify
from .finding import Finding
from .known import known_of
from .masks import Separated, separate
from .module_path import evaluating
from .notes import notes_of, shared_notes
from .report import FREE, Probe, SiteProbe
from .run import Run

logger = logging.getLogger(__name__)


def probe_model(
    model: nn.Module,
    example_inputs: Any,
    *,
    energy: float = 0.99,
    recipes: Iterable[Recipe] = (),
) -> Probe:
    """Find out what a model adds to its attention scores, without a recipe.

    The model runs twice, in evaluation mode, with different inputs: what is the same in both runs
    belongs to the model. Calls of `scaled_dot_product_attention` are seen as they are made. Every
    softmax over a product of two tensors is followed back to it, so the bias is what the model
    itself added, bit for bit, and not a difference of rounded scores. Kernels that are not
    torch's own are not seen. The model is as before afterwards.

    Args:
        model: any model that runs as it is; not compiled, not patched.
        example_inputs: as for `verify_model`: a tensor, a tuple of arguments, a mapping of keyword
            arguments, a list or another iterable of such calls, or `Inputs`. A tuple is always one
            call. Of an iterable the first two are taken; where there is one, a second is made from
            it. More samples make more certain whether a bias is a function of the query.
        energy: ranks are given for this share of squared singular values, in (0, 1].
        recipes: recipes beside the installed ones.

    Returns:
        One entry per attention call of each module, in the order in which they ran.

    Raises:
        UsageError: no inputs, a model that does not run with them, is wrapped or is patched.
    """
    if not 0.0 < energy <= 1.0:
        raise UsageError(f"energy must be in (0, 1], got {energy}")
    refuse_wrapped(model)
    if any(isinstance(module, PatchedAttention) for module in model.modules()):
        raise UsageError("the model is patched", "probe it before conversion, or unpatch it")
    first, second, about = _two_inputs(model, example_inputs)
    with leave_no_trace(model), evaluating(model):
        runs = [Run(model, batch).go() for batch in (first, second)]
    registry = Registry(tuple(recipes))
    sites = [
        _site(model, name, (runs[0], runs[1]), energy, registry)
        for name in runs[0].calls
        if name in runs[1].calls
    ]
    notes = [*_unmatched(runs), *_unseen(runs[0], bool(sites))]
    return Probe(
        qualified_name(type(model)), tuple(shared_notes(sites)), energy, about, tuple(notes)
    )


def _two_inputs(model: nn.Module, example_inputs: Any) -> tuple[Batch, Batch, str]:
    given = as_inputs(example_inputs, model=model)
    batches = list(itertools.islice(given.batches, 2))
    if not batches:
        raise UsageError("there are no inputs to probe with")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    batches = [batch.to(like.device, like.dtype) for batch in batches]
    if len(batches) == 2 and alike(*batches):
        return batches[0], batches[1], f"{given.source}, two batches of {batches[0].size}"
    other = changed(batches[0])
    if other is None:
        raise UsageError(
            "the example inputs hold nothing that could be changed",
            "pass two different inputs: [first, second]",
        )
    return batches[0], other, f"{given.source}, and the same with other values"


# -- sites -----------------------------------------------------------------------------------


def _site(
    model: nn.Module, name: str, runs: tuple[Run, Run], energy: float, registry: Registry
) -> SiteProbe:
    site = name.partition("#")[0]
    module = model.get_submodule(site)
    calls = (runs[0].calls[name], runs[1].calls[name])
    call = calls[0]
    parts, found = _found_out(name, calls, energy)
    known = known_of(model, site, registry, call.m, biased=found.kind not in FREE)
    cells = 0 if found.bias is None else len(found.bias) * call.heads * call.n * call.m
    done = SiteProbe(
        site=name,
        module_class=qualified_name(type(module)),
        seen=call.seen,
        kind=found.kind,
        detail=found.detail,
        heads=call.heads,
        n=call.n,
        m=call.m,
        head_dim=call.head_dim,
        batch=call.batch,
        scale=call.scale,
        term=found.term,
        ranks=None if found.fit is None else found.fit.ranks,
        attention_errors=None if found.fit is None else found.fit.attention_errors,
        dense_bytes=cells * (0 if found.bias is None else found.bias.element_size()),
        term_bytes=found.term_bytes,
        recipe=known.recipe,
        recipe_site=known.recipe_site,
        refused=known.refused,
        calls=max(1, runs[0].starts.get(site, 1)),
        bias=found.bias,
        terms=found.terms,
    )
    notes, causal = notes_of(done, calls, parts)
    return replace(done, notes=notes, causal=causal)


def _found_out(
    name: str, calls: tuple[AttentionCall, AttentionCall], energy: float
) -> tuple[tuple[Separated, Separated], Finding]:
    """The masks of both calls, and the kind of their bias."""
    try:
        parts = (separate(calls[0]), separate(calls[1]))
        return parts, classify(calls, parts, energy)
    except Exception as error:
        logger.debug("site %s failed", name, exc_info=True)
        nothing = Separated(None, None)
        return (nothing, nothing), Finding("unknown", f"{type(error).__name__}: {error}")


def _unmatched(runs: list[Run]) -> list[str]:
    failed = {**runs[1].failed, **runs[0].failed}
    notes = [f"{name or 'the model'} could not be looked at: {why}" for name, why in failed.items()]
    other = sorted((set(runs[0].calls) ^ set(runs[1].calls)) - set(failed))
    return notes + [f"{name or 'the model'} attended with one input only" for name in other]


def _unseen(run: Run, found: bool) -> list[str]:
    notes = [
        f"a softmax {shape} in {name or 'the model'} was not followed: its scores are not a "
        "product of two tensors with something added"
        for name, shape in run.lost.items()
    ]
    if not found and not notes:
        notes.append(
            "no attention was seen: torch's softmax and scaled_dot_product_attention are, but no "
            "exponentials that are summed by hand, and no kernels such as those of flash-attn, "
            "xformers and flex_attention"
        )
    return notes
