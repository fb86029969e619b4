"""Kinds of a bias that differs from input to input."""

from __future__ import annotations

import torch
from torch import Tensor

from .calls import ROUNDINGS, AttentionCall
from .dynamic import depends_on, gated_offsets, gated_rows, sum_of_axes
from .finding import Finding
from .pair_values import distinct_values
from .report import Kind
from .structure import named
from .suggest import ranks_of_calls

#: entries of the batch in which a bias of each input is looked at
ENTRIES = 16


def of_input(
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
        return finding(
            "gated", f"fixed rows times a gate{what}", term, 4 * (entries + batch * heads * n)
        )
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
    count = distinct_values(some[0], some[1], never, tolerance)
    if count is not None:
        detail = f"a table of {count} values, the same for every input, looked up for each pair"
        return finding(kind, detail, "lookup from a builder", 4 * (heads * count + batch * n * m))
    rank = max(fit.ranks or (m,))
    if fit.is_low_rank:
        entries = batch * heads * (n + m) * rank
        return finding(
            kind,
            f"rank {rank} in each call keeps {100 * energy:.4g} % of the energy",
            "low_rank from a builder",
            4 * entries,
        )
    return finding(
        kind, "no structure was found", "dense from a builder", batch * heads * n * m * size
    )


def _along_inputs(sides: list[Tensor | None], batch: int) -> Tensor | None:
    """q or k of both inputs behind each other, if their batch is that of the bias."""
    if any(side is None or len(side) != batch for side in sides):
        return None
    return torch.cat([side for side in sides if side is not None])
