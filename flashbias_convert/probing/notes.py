"""What a user should know about a site beside the kind of its bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..decompose import SHORT_GAIN, SHORTEST_N
from .calls import AttentionCall
from .masks import Separated
from .report import FREE, SiteProbe


def notes_of(
    site: SiteProbe, calls: tuple[AttentionCall, AttentionCall], parts: tuple[Separated, Separated]
) -> tuple[tuple[str, ...], bool]:
    """Sentences, and whether the attention is causal."""
    call, part = calls[0], parts[0]
    causal = call.causal or _is_causal(part.hidden)
    notes = _about_scale(call)
    if call.cosine:
        notes.append("rows of q and k have length one: cosine attention")
    if causal:
        notes.append("causal")
    elif part.hidden is not None:
        same = parts[1].hidden is not None and torch.equal(part.hidden, parts[1].hidden)
        notes.append(f"a mask hides keys, {'the same' if same else 'others'} for both inputs")
    for term in part.regions:
        windows = term.ids.shape[0] if term.ids.dim() > 1 else 1
        plural = f"{windows} windows" if windows > 1 else "every window"
        notes.append(f"a mask of {term.value:g} keeps regions apart, in {plural}")
    for count, what in zip(part.repeated, ("mask", "bias"), strict=True):
        if count:
            notes.append(f"the same {what} is added {count + 1} times")
    if call.key_heads != call.heads:
        notes.append(f"{call.heads} heads share {call.key_heads} heads of keys")
    if call.unknown:
        what = ", ".join(dict.fromkeys(call.unknown))
        notes.append(f"between product and softmax: {what}; the bias is what this left over")
    if site.calls > 1:
        notes.append(f"runs {site.calls} times in one pass; the first was looked at")
    if site.refused:
        notes.append(f"not converted, says the recipe {site.refused}")
    elif site.recipe_site is not None and site.recipe_site != site.name:
        notes.append(f"{site.recipe} replaces {site.recipe_site or 'the model'}, with this in it")
    if site.kind not in FREE and max(site.n, site.m) < SHORTEST_N:
        notes.append(f"fewer than {SHORTEST_N} queries and keys gain little ({SHORT_GAIN})")
    return tuple(notes), causal


def _about_scale(call: AttentionCall) -> list[str]:
    usual = call.head_dim**-0.5
    if isinstance(call.scale, tuple):
        return ["the scale is one number per head"]
    if call.scale != call.scale:
        return ["the scale is not one number per head"]
    if abs(call.scale - usual) <= 1e-3 * usual:
        return []
    return [f"scale is {call.scale:.4g}, not 1/sqrt({call.head_dim}) = {usual:.4g}"]


def _is_causal(hidden: Tensor | None) -> bool:
    if hidden is None:
        return False
    n, m = hidden.shape[-2:]
    later = torch.ones(n, m, dtype=torch.bool, device=hidden.device).triu(m - n + 1)
    return bool(later.any()) and bool((hidden == later).all())


def shared_notes(sites: Sequence[SiteProbe]) -> list[SiteProbe]:
    """Say of every site whose bias is that of an earlier one which one that is."""
    done: list[SiteProbe] = []
    owners: list[SiteProbe] = []
    for site in sites:
        if site.bias is None or site.terms is None:
            done.append(site)
            continue
        owner = next((o for o in owners if _is_same(o.bias, site.bias)), None)
        if owner is None:
            owners.append(site)
            done.append(site)
        else:
            note = f"the same bias as {owner.site or 'the model'}"
            done.append(replace(site, notes=(*site.notes, note)))
    return done


def _is_same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)
