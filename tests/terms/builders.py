"""Random terms of every kind.

All numbers are small integers, so that sums and products are exact in fp32 and results can be
compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from flashbias_convert.terms import (
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

Shape = tuple[int, ...]


@dataclass
class Maker:
    """Draws the tensors of one term.

    Args:
        n, m: queries and keys.
        own: size of the term's head dimension.
        batch: its leading dimensions.
        seed: of the numbers.
    """

    n: int = 4
    m: int = 5
    own: int = 3
    batch: Shape = ()
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def numbers(self, *shape: int) -> Tensor:
        """Whole numbers from -4 to 4, fp32."""
        return torch.randint(-4, 5, shape, generator=self.generator).float()

    def codes(self, high: int, *shape: int) -> Tensor:
        """Integers below `high`."""
        return torch.randint(high, shape, generator=self.generator, dtype=torch.int32)

    def ranks(self, largest: int) -> Shape:
        return tuple(int(r) for r in self.codes(largest + 1, self.own))

    def rows(self, *tail: int) -> Tensor:
        return self.numbers(*self.batch, self.own, self.n, *tail)

    def keys(self, *tail: int) -> Tensor:
        return self.numbers(*self.batch, self.own, self.m, *tail)


BUILDERS: dict[str, Callable[[Maker, dict[str, Any]], Term]] = {
    "alibi": lambda x, common: Alibi(
        slopes=x.numbers(*x.batch, x.own), symmetric=x.seed % 2 == 0, **common
    ),
    "axial": lambda x, common: Axial(
        rel_h=x.rows(2), rel_w=x.rows(3), y=x.codes(2, x.m), x=x.codes(3, x.m), **common
    ),
    "dense": lambda x, common: Dense(bias=x.rows(x.m), **common),
    "diagonal": lambda x, common: Diagonal(values=x.rows(), **common),
    "key_bias": lambda x, common: KeyBias(values=x.keys(), **common),
    "lookup": lambda x, common: Lookup(
        table=x.numbers(*x.batch, x.own, 6), code=x.codes(6, x.n, x.m), **common
    ),
    "low_rank": lambda x, common: LowRank(
        phi_q=x.rows(3), phi_k=x.keys(3), ranks=x.ranks(3), split=x.seed % 3, **common
    ),
    "regions": lambda x, common: Regions(
        ids=x.codes(3, *x.batch, x.n), key_ids=x.codes(3, *x.batch, x.m), value=-7.0, **common
    ),
    "relative_table": lambda x, common: RelativeTable(
        table=x.numbers(*x.batch, x.own, 9), u=x.codes(5, x.n), v=x.codes(5, x.m), **common
    ),
}


def build(kind: str, gated: bool = False, heads: Shape | None = None, **sizes: Any) -> Term:
    """A random term; `gated` adds a row scale."""
    x = Maker(**sizes)
    common: dict[str, Any] = {"heads": heads}
    if gated:
        common["row_scale"] = x.rows()
    return BUILDERS[kind](x, common)


@dataclass(frozen=True)
class Case:
    """A random bias and the sizes of a call that it fits."""

    bias: ScoreBias
    n: int
    m: int

    def dense(self, bias: ScoreBias | None = None, **options: Any) -> Tensor:
        return (bias or self.bias).dense(self.n, self.m, **options)


@st.composite
def cases(draw: st.DrawFn, max_terms: int = 3) -> Case:
    """Sums of terms of any kind: shared or own heads, some heads or all, gated or not."""
    n, m, num_heads = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    terms = []
    for _ in range(draw(st.integers(0, max_terms))):
        heads = None
        if draw(st.booleans()):
            order = draw(st.permutations(range(num_heads)))
            heads = tuple(order[: draw(st.integers(1, num_heads))])
        count = num_heads if heads is None else len(heads)
        terms.append(
            build(
                draw(st.sampled_from(sorted(BUILDERS))),
                gated=draw(st.booleans()),
                heads=heads,
                n=n,
                m=m,
                own=draw(st.sampled_from([1, count])),
                batch=draw(st.sampled_from([(), (2,), (3, 1), (3, 2)])),
                seed=draw(st.integers(0, 99)),
            )
        )
    return Case(ScoreBias(tuple(terms), num_heads), n, m)
