"""From what two runs added to their scores to a kind of bias, and the term that would serve."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..terms import ScoreBias
from .calls import ROUNDINGS, AttentionCall
from .classify_inputs import of_input
from .finding import Finding
from .masks import Separated
from .report import Kind
from .structure import (
    Pattern,
    by_offset,
    is_constant,
    named,
    per_key,
    slopes_of,
    symmetric_slopes,
)
from .suggest import Fit, fit_dense, fit_offsets, size_of


def classify(
    calls: tuple[AttentionCall, AttentionCall],
    parts: tuple[Separated, Separated],
    energy: float,
) -> Finding:
    """What kind of bias a site has.

    Args:
        calls: the same call with two different inputs.
        parts: the two without their masks.
        energy: for which ranks are given.
    """
    found = [p.bias for p in parts if p.bias is not None]
    if not found and any(p.zeros for p in parts):
        detail = "zeros: a mask that hides nothing, or weights that were never trained"
        return Finding("constant", detail)
    if not found:
        return Finding("none", "nothing is added to the scores")
    if len(found) < 2 or calls[0].heads != calls[1].heads or found[0].shape != found[1].shape:
        return Finding("unknown", "another bias, or one of another size, for the second input")
    if not all(bool(b.isfinite().all()) for b in found):
        return Finding("unknown", "the bias has entries that are not finite")
    heads = calls[0].heads
    samples, masked = _samples(found, parts, heads)
    largest = float(samples.masked_fill(masked, 0).abs().max())
    eps = torch.finfo(found[0].dtype).eps
    tolerance = max(p.rounding for p in parts) + ROUNDINGS * eps * largest
    pattern = _static(samples, masked, len(found[0]), tolerance)
    if pattern is not None:
        return _of_pattern(pattern, energy)
    return of_input(calls, found, masked, tolerance, energy)


def _samples(
    found: list[Tensor], parts: tuple[Separated, Separated], heads: int
) -> tuple[Tensor, Tensor]:
    """The biases of both runs behind each other, (S, H, N, M), and what is hidden in them."""
    biases, masks = [], []
    for bias, part in zip(found, parts, strict=True):
        bias = bias.expand(-1, heads, -1, -1)
        hidden = part.hidden
        if hidden is None:
            hidden = torch.zeros(1, 1, *bias.shape[-2:], dtype=torch.bool, device=bias.device)
        if hidden.shape[0] > bias.shape[0] == 1:  # one bias for all: what any entry shows of it
            hidden = hidden.all(0, keepdim=True)
        biases.append(bias)
        masks.append(hidden.expand(*_repeats(hidden, len(bias)), heads, *bias.shape[-2:]))
    return torch.cat(biases), torch.cat(masks)


def _repeats(hidden: Tensor, size: int) -> tuple[int]:
    return (size,) if hidden.shape[0] in (1, size) else (hidden.shape[0],)


# -- the same for all inputs -----------------------------------------------------------------


def _static(samples: Tensor, masked: Tensor, batch: int, tolerance: float) -> Pattern | None:
    """The bias of each window type, if it is the same in both runs and all their batches."""
    for period in (p for p in range(1, batch + 1) if batch % p == 0):
        own, hidden = (x.unflatten(0, (-1, period)) for x in (samples, masked))
        high = own.masked_fill(hidden, -math.inf).amax(0)
        low = own.masked_fill(hidden, math.inf).amin(0)
        seen = ~hidden.all(0)
        if bool(((high - low <= tolerance) | ~seen).all()):
            visible = seen.flatten(0, -3).any(0)
            bias = high.masked_fill(~seen, 0)
            return Pattern(bias, None if bool(visible.all()) else visible, tolerance)
    return None


def _of_pattern(pattern: Pattern, energy: float) -> Finding:
    bias, heads = pattern.bias, pattern.bias.shape[1]
    if is_constant(pattern):
        return Finding("constant", "constant along every row, which softmax ignores", bias=bias)
    key = per_key(pattern)
    if key is not None:
        alibi = slopes_of(key, pattern)
        term: Any = key if alibi is None else alibi
        detail = "one number per key" + ("" if alibi is None else ", evenly spaced: ALiBi")
        return _exact("per key", detail, term, bias, heads)
    types = "" if len(bias) == 1 else f", {len(bias)} window types"
    offsets = by_offset(pattern)
    if offsets is not None:
        table, grid = offsets
        both_ways = symmetric_slopes(table, grid, pattern)
        if both_ways is not None:
            detail = "minus a slope times the distance: ALiBi of both directions"
            fit = fit_dense(bias, pattern.visible, energy)
            return _exact("offset", detail, both_ways, bias, heads, fit)
        fit = fit_offsets(_squeezed(table), bias, pattern.visible, energy)
        done = _fitted("offset", named(grid) + types, bias, fit)
        exact = table.kind in done.term
        return done if exact else replace(done, term=f"{done.term} (exact: {table.kind})")
    fit = fit_dense(bias, pattern.visible, energy)
    few = 2 * max(fit.ranks or (max(bias.shape[-2:]),)) < min(bias.shape[-2:])
    kind: Kind = "low rank" if fit.is_low_rank and few else "dense"
    return _fitted(kind, f"the same for all inputs{types}", bias, fit)


def _exact(
    kind: Kind, detail: str, term: Any, bias: Tensor, heads: int, fit: Fit | None = None
) -> Finding:
    terms = ScoreBias((_squeezed(term),), heads)
    return Finding(kind, detail, _kinds(terms), bias, terms, fit, size_of(terms))


def _fitted(kind: Kind, detail: str, bias: Tensor, fit: Fit) -> Finding:
    assert fit.terms is not None
    return Finding(kind, detail, _kinds(fit.terms), bias, fit.terms, fit, size_of(fit.terms))


def _squeezed(term: Any) -> Any:
    """Without a batch of one."""
    return term.map_tensors(lambda name, t: t[0] if t.dim() > 2 and t.shape[0] == 1 else t)


def _kinds(terms: ScoreBias) -> str:
    found = dict.fromkeys(term.kind for term in terms.terms)
    symmetric = any(getattr(term, "symmetric", False) for term in terms.terms)
    return " + ".join(found) + (" (symmetric)" if symmetric else "")
