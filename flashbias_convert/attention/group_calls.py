"""What the operator `flashbias_convert::attention` launches: one call for each group of heads.

What torch computes here is part of compiled graphs, too, where the operator opens up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .flags import BOUNDED, CAUSAL, COSINE
from .normalize import normalize_rows
from .packing import GroupSpec, parse_spec


class GroupCall(NamedTuple):
    """The arguments of `launch.launch` for a group; `options` are those by keyword but one."""

    group: GroupSpec
    tensors: dict[str, Tensor]
    query_start: int
    options: dict[str, Any]


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised (*batch, H, N, Dv), laid out as (*batch, N, H, Dv).

    Attention modules merge heads next; in this layout that is a view.
    """
    *batch, heads, n, _ = q.shape
    dv = v.shape[-1]
    strides, step = [dv, heads * dv, 1], heads * n * dv
    for size in reversed(batch):
        strides.insert(0, step)
        step *= size
    return q.new_empty_strided((*batch, heads, n, dv), strides)  # no view: it may be written to


def group_calls(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias_tensors: Sequence[Tensor],
    spec: str,
    scale: float,
    head_scale: Tensor | None,
    key_mask: Tensor | None,
    query_start: int,
    query_starts: Tensor | None,
    flags: int,
    gate: Tensor | None = None,
) -> Iterator[GroupCall]:
    """Calls that fill `out`; the other arguments are those of the operator."""
    options = {
        "scale": scale,
        "causal": bool(flags & CAUSAL),
        "cosine": bool(flags & COSINE),
        "bounded": bool(flags & BOUNDED),
    }
    call = {"q": q, "k": normalize_rows(k) if options["cosine"] else k, "v": v, "o": out}
    if key_mask is not None:
        call["key_mask"] = key_mask
    if query_starts is not None:
        call["starts"] = query_starts
    if head_scale is not None:
        call["scale"] = head_scale
    if gate is not None:
        call["gate"] = gate
    first = 0
    for group in parse_spec(spec):
        last = first + len(group.tensors)
        own = dict(zip(group.tensors, bias_tensors[first:last], strict=True))
        yield GroupCall(group, call | own, query_start, options)
        first = last
