"""What the page shows, as JSON: a line per site, and the details of each."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..plan import Plan, SitePlan
from ..views import SiteView
from .maps import encode_map, side_and_heads

#: points of one energy curve
_MOST_POINTS = 160


def overview(plan: Plan, title: str, notes: tuple[str, ...]) -> dict[str, Any]:
    """Everything but the details.

    Args:
        plan: what was decided.
        title: of the page: the checkpoint and its architecture.
        notes: what the user should know.
    """
    return {
        "title": title,
        "notes": list(notes),
        "counts": plan.counts(),
        "options": plan.options.to_json(),
        "versions": plan.versions,
        "sites": [site_line(site) for site in plan.sites],
    }


def site_line(site: SitePlan) -> dict[str, Any]:
    """One site in the table; numbers are None where nothing was decomposed."""
    decisions, ranks = site.decisions, site.ranks()
    return {
        "name": site.name or "(the model)",
        "status": site.status,
        "n": site.n,
        "m": site.m,
        "heads": site.heads,
        "terms": "+".join(site.terms()),
        "ranks": ranks,
        "energy": min((d.energy for d in decisions), default=None),
        "logit_max": max((d.logit_error_max for d in decisions), default=None),
        "logit_rms": [d.logit_error_rms for d in decisions],
        "attention": [d.attention_error for d in decisions],
        "gain": site.gain,
    }


def site_details(view: SiteView, sites: int) -> dict[str, Any]:
    """One site in full: its decisions, energy curves and heat maps.

    Args:
        view: the site.
        sites: how many there are, which share the size of the page.
    """
    site = view.site
    side, most = side_and_heads(sites, view.heads)
    shown = _most_interesting(site, view.heads, most)
    return {
        "recipe": site.recipe,
        "reason": site.reason,
        "note": view.note,
        "warnings": list(site.warnings),
        "head_dim": site.head_dim,
        "decisions": [d.to_json() for d in site.decisions],
        "energy": None if view.energy is None else _curves(view.energy),
        "maps": {str(head): _maps(view, head, side) for head in shown},
        "heads_without_maps": view.heads - len(shown),
        "reduced": view.heads > 0 and max(site.n, site.m) > side,
    }


def _most_interesting(site: SitePlan, heads: int, most: int) -> list[int]:
    """The heads that lose most, in order of their index."""
    lost = {d.head: d.attention_error for d in site.decisions}
    ranked = sorted(range(heads), key=lambda h: lost.get(h, 0.0), reverse=True)
    return sorted(ranked[:most])


def _maps(view: SiteView, head: int, side: int) -> dict[str, Any]:
    assert view.bias is not None
    found = {"bias": encode_map(view.bias[head], side)}
    residual = view.residual()
    if residual is not None and view.approximation is not None:
        found["terms"] = encode_map(view.approximation[head], side)
        found["residual"] = encode_map(residual[head], side, extreme=True)
    return found


def _curves(energy: Tensor) -> dict[str, Any]:
    """Ranks, and per head the share that is lost at them, to 99.99 % of every head."""
    enough = int((energy < 0.9999).sum(-1).max()) + 1
    count = min(energy.shape[-1], enough)
    step = math.ceil(count / _MOST_POINTS)
    at = [*range(0, count - 1, step), count - 1]
    lost = (1 - energy[:, at]).tolist()
    return {
        "ranks": [k + 1 for k in at],
        "lost": [[float(f"{v:.4g}") for v in head] for head in lost],
    }
