"""Inputs for the operator's tests: q, k, v and one bias of every kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
)
from flashbias_convert.attention import flashbias_attention
from tests.support import assert_parity

Shape = tuple[int, ...]


class Inputs:
    """Seeded q, k and v; every call of a builder draws fresh numbers.

    Args:
        device: where tensors live.
        dtype: of q, k and v.
        batch, heads, n, m, d, dv: sizes.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        batch: Shape = (2,),
        heads: int = 2,
        kv_heads: int | None = None,
        n: int = 40,
        m: int | None = None,
        d: int = 16,
        dv: int | None = None,
        seed: int = 0,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.heads, self.n, self.m = heads, n, n if m is None else m
        self.generator = torch.Generator().manual_seed(seed)
        kv = heads if kv_heads is None else kv_heads
        dv = d if dv is None else dv
        self.q = self.normal(*batch, heads, n, d).to(dtype)
        self.k = self.normal(*batch, kv, self.m, d).to(dtype)
        self.v = self.normal(*batch, kv, self.m, dv).to(dtype)

    def nudged(self, seed: int) -> Inputs:
        """The same with every number changed by a unit in its last place, or not, at random."""
        twin = copy.copy(self)
        generator = torch.Generator().manual_seed(seed)
        for name in ("q", "k", "v"):
            own: Tensor = getattr(self, name)
            step = torch.randint(-1, 2, own.shape, generator=generator).to(own)
            setattr(twin, name, own * (1 + step * torch.finfo(own.dtype).eps))
        return twin

    def normal(self, *shape: int) -> Tensor:
        """Standard normal fp32 numbers."""
        return torch.randn(shape, generator=self.generator).to(self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Integers from 0 to high - 1."""
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def bias(self, *terms: object) -> ScoreBias:
        """A bias for these heads."""
        return ScoreBias(terms, self.heads)  # type: ignore[arg-type]

    # -- one builder per kind of term ------------------------------------------------------

    def low_rank(self, rank: int = 5, batch: Shape = (), **fields: object) -> LowRank:
        own = len(fields["heads"]) if fields.get("heads") else self.heads  # type: ignore[arg-type]
        return LowRank(
            phi_q=self.normal(*batch, own, self.n, rank),
            phi_k=self.normal(*batch, own, self.m, rank),
            **fields,  # type: ignore[arg-type]
        )

    def key_bias(self, batch: Shape = ()) -> KeyBias:
        return KeyBias(values=2 * self.normal(*batch, self.heads, self.m))

    def alibi(self, symmetric: bool = False) -> Alibi:
        slopes = 0.5 ** torch.arange(1, self.heads + 1, device=self.device)
        return Alibi(slopes=slopes, symmetric=symmetric)

    def table(self, size: int = 23) -> RelativeTable:
        return RelativeTable(
            table=2 * self.normal(self.heads, 2 * size - 1),
            u=self.integers(size, self.n),
            v=self.integers(size, self.m),
        )

    def pairs(self, width: int, batch: Shape = ()) -> RelativeTable:
        """A table of windows whose rows have an even number of tokens."""
        token = torch.arange(self.n, device=self.device)
        u = token // width * (2 * width - 1) + token % width
        values = 2 * self.normal(*batch, self.heads, 2 * int(u.max()) + 1)
        return RelativeTable.of_codes(values, u, u.flip(0))

    def distances(self, step: int) -> RelativeTable:
        """A table by distance that rises with the key (1), or falls (-1)."""
        values = 2 * self.normal(self.heads, self.n + self.m - 1)
        rows = torch.arange(self.n, device=self.device)
        keys = torch.arange(self.m, device=self.device)
        u, v = (self.n - 1 - rows, keys) if step > 0 else (rows, self.m - 1 - keys)
        return RelativeTable.of_codes(values, u, v, step)

    def regions(self, windows: Shape = ()) -> Regions:
        return Regions(
            ids=self.integers(3, *windows, self.n),
            key_ids=self.integers(3, *windows, self.m),
            value=-3.0,
        )

    def dense(self, batch: Shape = ()) -> Dense:
        return Dense(bias=2 * self.normal(*batch, self.heads, self.n, self.m))

    def diagonal(self, batch: Shape = ()) -> Diagonal:
        return Diagonal(values=3 * self.normal(*batch, self.heads, self.n))

    def lookup(self, batch: Shape = ()) -> Lookup:
        code = self.integers(11, *batch, self.n, self.m)
        return Lookup(table=2 * self.normal(self.heads, 11), code=code)

    def axial(self, batch: Shape = (), dtype: torch.dtype | None = None) -> Axial:
        """Rows in the dtype of q, as products of q have them, or in another."""
        own = self.dtype if dtype is None else dtype
        return Axial(
            rel_h=self.normal(*batch, self.heads, self.n, 5).to(own),
            rel_w=self.normal(*batch, self.heads, self.n, 9).to(own),
            y=self.integers(5, self.m),
            x=self.integers(9, self.m),
        )

    def rows(self, term: object, batch: Shape = ()) -> object:
        """The same term with a random gate on its rows."""
        import dataclasses

        gate = self.normal(*batch, self.heads, self.n)
        return dataclasses.replace(term, row_scale=gate)  # type: ignore[type-var]


#: One bias of every kind, and of kinds together.
BIASES: dict[str, Callable[[Inputs], ScoreBias | None]] = {
    "none": lambda x: None,
    "low_rank": lambda x: x.bias(x.low_rank()),
    "low_rank-rank1": lambda x: x.bias(x.low_rank(1)),
    "low_rank-unsplit-ranks": lambda x: x.bias(
        x.low_rank(17, ranks=tuple(1 + 3 * h for h in range(x.heads)), split=0)
    ),
    "low_rank-rows": lambda x: x.bias(x.rows(x.low_rank())),
    "two-low_ranks": lambda x: x.bias(x.low_rank(3), x.low_rank(2)),
    "key_bias": lambda x: x.bias(x.key_bias()),
    "key_bias-rows": lambda x: x.bias(x.rows(x.key_bias())),
    "alibi": lambda x: x.bias(x.alibi()),
    "alibi-symmetric-rows": lambda x: x.bias(x.rows(x.alibi(symmetric=True))),
    "relative_table": lambda x: x.bias(x.table()),
    "relative_table-rows": lambda x: x.bias(x.rows(x.table())),
    "regions": lambda x: x.bias(x.regions()),
    "regions-rows": lambda x: x.bias(x.rows(x.regions())),
    "dense": lambda x: x.bias(x.dense()),
    "dense-rows": lambda x: x.bias(x.rows(x.dense())),
    "two-dense": lambda x: x.bias(
        Dense(bias=x.normal(1, x.n, x.m), heads=(x.heads - 1,)), x.rows(x.dense((2,))), x.alibi()
    ),
    "diagonal": lambda x: x.bias(x.diagonal()),
    "diagonal-rows": lambda x: x.bias(x.rows(x.diagonal((2,)))),
    "lookup": lambda x: x.bias(x.lookup((2,))),
    "lookup-rows": lambda x: x.bias(x.rows(x.lookup())),
    "axial": lambda x: x.bias(x.axial((2,))),
    "axial-rows": lambda x: x.bias(x.rows(x.axial())),
    "all": lambda x: x.bias(
        x.low_rank(), x.key_bias(), x.alibi(), x.table(), x.regions(), x.dense(), x.diagonal()
    ),
    "heads-differ": lambda x: x.bias(
        x.low_rank(20, heads=(0,), split=0),
        Dense(bias=x.normal(1, x.n, x.m), heads=(x.heads - 1,)),
        x.regions(),
    ),
}


def truth_of(x: Inputs, bias: ScoreBias | None, **options: object) -> Tensor:
    """The float64 reference."""
    return flashbias_attention(
        x.q.double(),
        x.k.double(),
        x.v.double(),
        bias,
        backend="eager",
        **options,  # type: ignore[arg-type]
    )


def plain_of(x: Inputs, bias: ScoreBias | None, **options: object) -> Tensor:
    """Plain attention in the dtype of the inputs, every step as torch does it.

    This is the yardstick for tolerances: what a user gets from the formula in this dtype. Its
    error depends on luck, so it is computed with the keys in two orders and by torch's attention
    with a dense mask, and the worst is taken.
    """
    truth = truth_of(x, bias, **options)
    orders = [torch.arange(x.m), torch.arange(x.m).flip(0)]
    results = [_plain(x, bias, order.to(x.device), **options) for order in orders]
    results.append(_plain(x, bias, orders[0].to(x.device), fused=True, **options))
    return max(results, key=lambda r: float((r.double() - truth).abs().nan_to_num(0).max()))


def _plain(
    x: Inputs, bias: ScoreBias | None, order: Tensor, fused: bool = False, **options: object
) -> Tensor:
    mask = options.get("key_mask")
    start = options.get("query_start", x.m - x.n)
    scale = options.get("scale")
    groups = x.q.shape[-3] // x.k.shape[-3]
    q = x.q
    k, v = (t.repeat_interleave(groups, -3)[..., order, :] for t in (x.k, x.v))
    if options.get("cosine"):
        q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
        scale = 1.0 if scale is None else scale
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(scale, Tensor):
        scale = scale.reshape(-1, 1, 1).to(q.dtype)
    dense = torch.zeros(x.heads, x.n, x.m, device=q.device)
    if bias is not None:
        dense = bias.dense(x.n, x.m, query_start=start)[..., order]  # type: ignore[arg-type]
    visible = torch.ones(x.n, x.m, dtype=torch.bool, device=q.device)
    if options.get("causal"):
        rows = torch.arange(x.n, device=q.device)[:, None]
        visible = torch.arange(x.m, device=q.device) <= start + rows  # type: ignore[operator]
    if isinstance(mask, Tensor):
        visible = visible & mask[..., None, None, :]
    visible = visible[..., order]
    nothing = ~visible.any(-1, keepdim=True)
    gate = options.get("gate")
    opened = gate.sigmoid() if isinstance(gate, Tensor) else 1
    if fused:
        hidden = dense.to(q.dtype).masked_fill(~visible, float("-inf"))
        out = torch.nn.functional.scaled_dot_product_attention(q * scale, k, v, hidden, scale=1.0)
        return out.masked_fill(nothing, 0.0) * opened
    scores = (q @ k.transpose(-1, -2)) * scale + dense.to(q.dtype)
    scores = scores.masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1).masked_fill(nothing, 0.0) @ v) * opened


def views(x: Tensor) -> Sequence[Tensor]:
    """`x` with the same values in other layouts: transposed, packed, off by one element."""
    turned = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    packed = torch.stack([x, x, x], -2).select(-2, 1)
    shifted = torch.nn.functional.pad(x, (1, 7))[..., 1 : 1 + x.shape[-1]]
    if x.dim() < 3:
        return [turned, packed, shifted]
    return [turned, packed, shifted, x.transpose(-2, -3).contiguous().transpose(-2, -3)]


def check(x: Inputs, bias: ScoreBias | None, backend: str, **options: object) -> None:
    """Assert that a backend computes the formula, about as well as plain attention does."""
    actual = flashbias_attention(x.q, x.k, x.v, bias, backend=backend, **options)  # type: ignore[arg-type]
    assert actual.dtype == x.dtype

    def pair(x: Inputs) -> tuple[Tensor, Tensor]:
        return plain_of(x, bias, **options), truth_of(x, bias, **options)

    assert_parity(actual, *pair(x), nearby=lambda number: pair(x.nudged(number)))
