"""Attention calls of every form that sites have, small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashbias_convert.attention.arguments import check_arguments
from flashbias_convert.benchmark.calls import AttentionCall
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


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make_call(
    *terms: Term,
    batch: tuple[int, ...] = (2,),
    heads: int = 4,
    kv_heads: int | None = None,
    n: int = 21,
    d: int = 10,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> AttentionCall:
    """A self-attention call with these terms."""
    q = draw(*batch, heads, n, d).to(dtype)
    k, v = (draw(*batch, kv_heads or heads, n, d, seed=i).to(dtype) for i in (1, 2))
    args: dict[str, Any] = {"scale": None, "causal": False, "query_start": None,
                            "key_mask": None, "cosine": False}  # fmt: skip
    bias = ScoreBias(terms, heads)
    return AttentionCall(q, k, v, bias, check_arguments(q, k, v, **{**args, **options}))


def low_rank(
    heads: int = 4, ranks: tuple[int, ...] | None = None, of: tuple[int, ...] | None = None
) -> LowRank:
    phi_q, phi_k = draw(heads, 21, 3), draw(heads, 21, 3, seed=5)
    return LowRank(phi_q=phi_q, phi_k=phi_k, ranks=ranks, heads=of)


def regions(n: int = 21, windows: int = 3) -> Regions:
    ids = torch.arange(windows * n).reshape(windows, n) % 4
    return Regions(ids=ids.to(torch.int32))


def alibi(heads: int = 4) -> Alibi:
    return Alibi(slopes=2.0 ** -torch.arange(1.0, heads + 1))


#: name -> a function that makes a call
CALLS: dict[str, Callable[[], AttentionCall]] = {
    "low rank": lambda: make_call(low_rank()),
    "windows": lambda: make_call(low_rank(), regions(), batch=(2, 3)),
    "types of windows": lambda: make_call(Dense(bias=draw(3, 1, 4, 21, 21)), batch=(2, 3, 2)),
    "cosine": lambda: make_call(
        low_rank(), batch=(2,), cosine=True, scale=torch.tensor([4.0, 8.0, 10.0, 2.0])
    ),
    "causal": lambda: make_call(alibi(), causal=True),
    "shared keys": lambda: make_call(alibi(), kv_heads=2, causal=True),
    "padded": lambda: make_call(
        low_rank(), key_mask=torch.arange(21).expand(2, 21) < torch.tensor([[21], [15]])
    ),
    "some heads": lambda: make_call(low_rank(heads=2, of=(1, 3))),
}

#: one term of every kind, for four heads and 21 tokens
TERMS: dict[str, Term] = {
    "alibi": alibi(),
    "axial": Axial(
        rel_h=draw(4, 21, 3), rel_w=draw(4, 21, 7), y=torch.arange(21) // 7, x=torch.arange(21) % 7
    ),
    "dense": Dense(bias=draw(4, 21, 21)),
    "diagonal": Diagonal(values=draw(4, 21)),
    "key_bias": KeyBias(values=draw(1, 21), row_scale=draw(4, 21)),
    "lookup": Lookup(table=draw(4, 9), code=torch.randint(9, (21, 21))),
    "low_rank": low_rank(ranks=(3, 1, 2, 3)),
    "regions": regions(windows=1),
    "relative_table": RelativeTable(table=draw(4, 41), u=torch.arange(21), v=20 - torch.arange(21)),
}
