"""From what two runs added to their scores to a kind of bias, and the term that would serve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..terms import ScoreBias
from .calls import ROUNDINGS, AttentionCall
from .dynamic import depends_on, gated_offsets, gated_rows, sum_of_axes
from .masks import Separated, together
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
from .suggest import Fit, fit_dense, fit_offsets, ranks_of_calls, size_of

#: entries of the batch in which a bias of each input is looked at
ENTRIES = 16


@dataclass(frozen=True, eq=False)
class Finding:
    """A kind of bias, and what was measured.

    Attributes:
        kind, detail, term: see `SiteProbe`.
        bias: (b, H, N, M), or None.
        terms: of a bias that does not depend on the input.
        fit: ranks and errors, where an SVD was made.
        term_bytes: of the terms of one call.
    """

    kind: Kind
    detail: str
    term: str = ""
    bias: Tensor | None = None
    terms: ScoreBias | None = None
    fit: Fit | None = None
    term_bytes: int = 0


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
    if not found:
        return Finding("none", "nothing is added to the scores")
    if len(found) < 2 or calls[0].heads != calls[1].heads or found[0].shape != found[1].shape:
        return Finding("unknown", "another bias, or one of another size, for the second input")
    if not all(bool(b.isfinite().all()) for b in found):
        return Finding("unknown", "the bias has entries that are not finite")
    heads = calls[0].heads
    first = found[0].expand(-1, heads, -1, -1)
    bias, hidden = together(first, found[1].expand(-1, heads, -1, -1))
    del hidden
    samples, masked = _samples(found, parts, heads)
    largest = float(samples.masked_fill(masked, 0).abs().max())
    eps = torch.finfo(bias.dtype).eps
    tolerance = max(p.rounding for p in parts) + ROUNDINGS * eps * largest
    pattern = _static(samples, masked, len(found[0]), tolerance)
    if pattern is not None:
        return _of_pattern(pattern, energy)
    return _of_input(calls, found, masked, tolerance, energy)


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
        return _fitted("offset", named(grid) + types, bias, fit)
    fit = fit_dense(bias, pattern.visible, energy)
    kind: Kind = "low rank" if fit.is_low_rank else "dense"
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


# -- different for each input ----------------------------------------------------------------


def _of_input(
    calls: tuple[AttentionCall, AttentionCall],
    found: list[Tensor],
    masked: Tensor,
    tolerance: float,
    energy: float,
) -> Finding:
    heads, (n, m) = calls[0].heads, found[0].shape[-2:]
    batch = len(found[0])
    never = masked.any(0).any(0)  # hidden from one is hidden from all: less to look at
    some = [b[:ENTRIES].expand(-1, heads, -1, -1).double().masked_fill(never, 0) for b in found]
    samples = torch.cat(some)
    fit = ranks_of_calls(some[0], None if not bool(never.any()) else ~never, energy)
    eps = torch.finfo(found[0].dtype).eps

    def finding(kind: Kind, detail: str, term: str, numbers: float) -> Finding:
        return Finding(kind, detail, term, found[0], None, fit, int(numbers))

    size = found[0].element_size()
    rows = gated_rows(samples, 2 * tolerance)
    if rows is not None:
        offsets = gated_offsets(rows, ROUNDINGS * eps * n)
        what = "" if offsets is None else f": {named(offsets[1])}"
        entries = rows.numel() if offsets is None else offsets[0].numel()
        term = f"{'dense' if offsets is None else 'relative_table'} with row_scale from a builder"
        return finding("gated", f"fixed rows times a gate{what}", term, 4 * (entries + batch * heads * n))
    queries = _along_inputs([c.q for c in calls], batch)
    keys = _along_inputs([c.k for c in calls], batch)
    everything = torch.cat(found).expand(-1, heads, -1, -1).double()
    depends = depends_on(everything, queries, keys, 2 * tolerance)
    axes = None if bool(never.any()) else sum_of_axes(samples, 4 * tolerance)
    kind: Kind = "input-dependent" if depends is None else "query-dependent"
    of = "" if depends is None else f", linear in {depends}"
    if axes is not None:
        height, width, special = axes
        where = f"a sum over the axes of {height} x {width} keys{special * ' behind one special'}"
        entries = batch * heads * n * (height + width)
        return finding(kind, where + of, "axial from a builder", size * entries)
    if depends is not None:
        return finding(kind, of[2:], "dense from a builder", found[0][:, :1].numel() * heads * size)
    rank = max(fit.ranks or (m,))
    if fit.is_low_rank:
        entries = batch * heads * (n + m) * rank
        return finding(kind, f"rank {rank} in each call", "low_rank from a builder", 4 * entries)
    return finding(kind, "no structure was found", "dense from a builder", batch * heads * n * m * size)


def _along_inputs(sides: list[Tensor | None], batch: int) -> Tensor | None:
    """q or k of both inputs behind each other, if their batch is that of the bias."""
    if any(side is None or len(side) != batch for side in sides):
        return None
    return torch.cat([side for side in sides if side is not None])
