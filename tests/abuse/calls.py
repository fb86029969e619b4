"""Random attention calls: any shapes, dtypes, strides, terms, masks and options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from flashbias_convert import (
    Alibi,
    Axial,
    Dense,
    Diagonal,
    KeyBias,
    Lookup,
    LowRank,
    Regions,
    RelativeTable,
    ScoreBias,
    Term,
)
from tests.attention.cases import Inputs

from .layouts import LAYOUTS, in_layout

Shape = tuple[int, ...]
BATCHES: tuple[Shape, ...] = ((), (1,), (2,), (3, 2), (2, 1, 2))


@dataclass(frozen=True)
class TermPlan:
    """One term, without its numbers."""

    kind: str
    heads: Shape | None
    batch: Shape
    shared: bool
    gated: bool
    layout: str
    rank: int
    split: int | None
    dtype: torch.dtype
    flag: bool


@dataclass(frozen=True)
class CallPlan:
    """A call, without its numbers; `options` are arguments of `flashbias_attention`."""

    sizes: dict[str, Any]
    dtype: torch.dtype
    layouts: tuple[str, str, str]
    terms: tuple[TermPlan, ...]
    options: dict[str, Any] = field(default_factory=dict)
    mask_batch: Shape | None = None
    head_scale: bool = False

    def draw(self, seed: int) -> tuple[Inputs, ScoreBias | None, dict[str, Any]]:
        """The numbers."""
        x = Inputs(torch.device("cpu"), self.dtype, seed=seed, **self.sizes)
        x.q, x.k, x.v = map(in_layout, (x.q, x.k, x.v), self.layouts)
        options = dict(self.options)
        if self.mask_batch is not None:
            options["key_mask"] = x.integers(4, *self.mask_batch, x.m) > 0
        if self.head_scale:
            options["scale"] = x.normal(x.heads)
        bias = x.bias(*(_make(term, x) for term in self.terms)) if self.terms else None
        return x, bias, options


def _make(plan: TermPlan, x: Inputs) -> Term:
    count = x.heads if plan.heads is None else len(plan.heads)
    own = 1 if plan.shared else count
    term = _BUILDERS[plan.kind](plan, x, own)
    term = term.map_tensors(lambda name, t: in_layout(t, plan.layout))
    gate = x.normal(*plan.batch, own, x.n) if plan.gated else None
    return dataclasses.replace(term, heads=plan.heads, row_scale=gate)


def _low_rank(plan: TermPlan, x: Inputs, own: int) -> Term:
    ranks = tuple(int(r) for r in x.integers(plan.rank + 1, own)) if plan.flag else None
    return LowRank(
        phi_q=x.normal(*plan.batch, own, x.n, plan.rank),
        phi_k=x.normal(*plan.batch, own, x.m, plan.rank),
        ranks=ranks,
        split=plan.split,
    )


def _alibi(plan: TermPlan, x: Inputs, own: int) -> Term:
    positions = {}
    if plan.gated:  # positions of their own, as with padding on the left
        positions["pos_k"] = x.integers(x.m + 3, *plan.batch, x.m)
    return Alibi(slopes=x.normal(*plan.batch, own).abs(), symmetric=plan.flag, **positions)


def _table(plan: TermPlan, x: Inputs, own: int) -> Term:
    table = x.normal(*plan.batch, own, 17)
    return RelativeTable(table=table, u=x.integers(9, x.n), v=x.integers(9, x.m))


def _regions(plan: TermPlan, x: Inputs, own: int) -> Term:
    keys = x.integers(3, *plan.batch, x.m)
    return Regions(ids=x.integers(3, *plan.batch, x.n), key_ids=keys, value=-4.0)


def _axial(plan: TermPlan, x: Inputs, own: int) -> Term:
    return Axial(
        rel_h=x.normal(*plan.batch, own, x.n, 3),
        rel_w=x.normal(*plan.batch, own, x.n, 5),
        y=x.integers(3, x.m),
        x=x.integers(5, x.m),
    )


def _lookup(plan: TermPlan, x: Inputs, own: int) -> Term:
    code = x.integers(7, *plan.batch, x.n, x.m)
    return Lookup(table=x.normal(own, 7), code=code)


_BUILDERS = {
    "alibi": _alibi,
    "axial": _axial,
    "dense": lambda plan, x, own: Dense(
        bias=x.normal(*plan.batch, own, x.n, x.m).to(plan.dtype)
    ),
    "diagonal": lambda plan, x, own: Diagonal(values=x.normal(*plan.batch, own, x.n)),
    "key_bias": lambda plan, x, own: KeyBias(values=x.normal(*plan.batch, own, x.m)),
    "lookup": _lookup,
    "low_rank": _low_rank,
    "regions": _regions,
    "relative_table": _table,
}  # fmt: skip


# -- strategies ----------------------------------------------------------------------------


def _broadcastable(draw: st.DrawFn, batch: Shape) -> Shape:
    """A shape that broadcasts to `batch`, right-aligned."""
    kept = draw(st.integers(0, len(batch)))
    tail = batch[len(batch) - kept :]
    return tuple(1 if draw(st.booleans()) else size for size in tail)


@st.composite
def term_plans(draw: st.DrawFn, heads: int, batch: Shape) -> TermPlan:
    """A term of any kind for some or all of `heads` heads."""
    some = None
    if draw(st.integers(0, 3)) == 0:
        order = draw(st.permutations(range(heads)))
        some = tuple(order[: draw(st.integers(1, heads))])
    return TermPlan(
        kind=draw(st.sampled_from(sorted(_BUILDERS))),
        heads=some,
        batch=_broadcastable(draw, batch),
        shared=draw(st.integers(0, 3)) == 0,
        gated=draw(st.integers(0, 3)) == 0,
        layout=draw(st.sampled_from(LAYOUTS)),
        rank=draw(st.integers(1, 20)),
        split=draw(st.sampled_from([None, 0, 2])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.float64])),
        flag=draw(st.booleans()),
    )


@st.composite
def call_plans(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], longest: int = 70, max_terms: int = 3
) -> CallPlan:
    """Any call that the operator promises to answer."""
    batch = draw(st.sampled_from(BATCHES))
    heads = draw(st.integers(1, 4))
    groups = draw(st.sampled_from([g for g in (1, 2, 3, 4) if heads % g == 0]))
    n, m = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    cosine = draw(st.booleans())
    options: dict[str, Any] = {"cosine": cosine, "causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["query_start"] = draw(st.integers(-2, m + 2))
    scale = draw(st.sampled_from([None, 0.0, 0.25, 1.0, -0.5, 8.0 if cosine else 2.0, "heads"]))
    if isinstance(scale, float):
        options["scale"] = scale
    return CallPlan(
        sizes={
            "batch": batch,
            "heads": heads,
            "kv_heads": heads // groups,
            "n": n,
            "m": m,
            "d": draw(st.integers(1, 40)),
            "dv": draw(st.integers(1, 40)),
        },
        dtype=draw(st.sampled_from(dtypes)),
        layouts=tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(3)),
        terms=tuple(draw(term_plans(heads, batch)) for _ in range(draw(st.integers(0, max_terms)))),
        options=options,
        mask_batch=_broadcastable(draw, batch) if draw(st.booleans()) else None,
        head_scale=scale == "heads",
    )
