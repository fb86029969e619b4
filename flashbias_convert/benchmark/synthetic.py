"""Terms of the same kinds as a site's, for another length: random values, the same structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention import SLACK, bias_bound
from ..errors import UsageError
from ..terms import (
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
from ..terms.regions import are_in_twos
from .calls import AttentionCall


@dataclass(frozen=True)
class _Maker:
    """Draws tensors of one device for one length."""

    n: int
    device: torch.device
    generator: torch.Generator

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(
            high, shape, generator=self.generator, dtype=torch.int32, device=self.device
        )

    def window(self) -> tuple[int, int]:
        """Height and width of a window of n tokens, as square as a power of two can be."""
        height = 1 << ((self.n.bit_length() - 1) // 2)
        return (height, self.n // height) if self.n % height == 0 else (1, self.n)

    def cells(self) -> tuple[Tensor, Tensor, int]:
        """Row and column of each token of the window, and its width."""
        _, width = self.window()
        token = torch.arange(self.n, device=self.device, dtype=torch.int32)
        return token // width, token % width, width


def fixed_n(bias: ScoreBias) -> bool:
    """Whether the terms are for one length only."""
    return any(term.sizes() for term in bias.terms)


def synthetic_call(call: AttentionCall, n: int, batch: int, seed: int = 0) -> AttentionCall:
    """A self-attention like `call`, with n tokens and random values.

    Args:
        call: of a site.
        n: number of queries and of keys.
        batch: leading dimension of q; the terms have none.
        seed: of the values.

    Raises:
        UsageError: a kind of term that is not known here.
    """
    generator = torch.Generator(call.q.device).manual_seed(seed)
    maker = _Maker(n, call.q.device, generator)

    def draw(like: Tensor) -> Tensor:
        # as modules have them: views of one projection, (batch, n, heads, size)
        heads, size = like.shape[-3], like.shape[-1]
        return maker.draw(batch, n, heads, size).to(like.dtype).transpose(1, 2)

    terms = tuple(_like(term, maker, call.q.dtype) for term in call.bias.terms)
    bias = ScoreBias(terms, call.bias.num_heads)
    args = replace(call.args, query_start=0, key_mask=None)
    bound = None
    if call.score_bound is not None and args.cosine:
        scale = args.scale
        largest = float(scale.max()) if isinstance(scale, Tensor) else float(scale)
        known = bias_bound(bias)
        bound = None if known is None else SLACK * largest + known
    return AttentionCall(draw(call.q), draw(call.k), draw(call.v), bias, args, bound, call.backend)


def _like(term: Term, maker: _Maker, dtype: torch.dtype) -> Term:
    heads = max(1, term.num_own_heads())
    made = _MAKERS.get(type(term))
    if made is None:
        raise UsageError(f"terms of kind {term.kind} cannot be made for another length")
    found = made(term, maker, heads, dtype)
    scale = term.row_scale
    if scale is None:
        return found
    rows = 1 if scale.shape[-1] == 1 else maker.n
    return dataclasses.replace(found, row_scale=maker.draw(scale.shape[-2], rows))


def _alibi(term: Alibi, maker: _Maker, heads: int, _: torch.dtype) -> Term:
    slopes = term.slopes.reshape(-1, term.slopes.shape[-1])[0]
    return replace(term, slopes=slopes, pos_q=None, pos_k=None, row_scale=None)


def _key_bias(term: KeyBias, maker: _Maker, heads: int, _: torch.dtype) -> Term:
    return KeyBias(values=maker.draw(heads, maker.n), heads=term.heads)


def _low_rank(term: LowRank, maker: _Maker, heads: int, _: torch.dtype) -> Term:
    rank = term.max_rank
    return replace(
        term,
        phi_q=maker.draw(heads, maker.n, rank) / max(1, rank) ** 0.5,
        phi_k=maker.draw(heads, maker.n, rank),
        row_scale=None,
    )


def _relative_table(term: RelativeTable, maker: _Maker, heads: int, _: torch.dtype) -> Term:
    if term.by_distance:
        u = torch.arange(maker.n, device=maker.device)
        down = maker.n - 1 - u
        u, v = (down, u) if term.by_distance > 0 else (u, down)
        table = maker.draw(heads, 2 * maker.n - 1)
        made = RelativeTable.of_codes(table, u, v, term.by_distance)
        return dataclasses.replace(made, heads=term.heads)
    height, width = maker.window()
    row, column, _width = maker.cells()
    u = row * (2 * width - 1) + column
    size = (2 * height - 1) * (2 * width - 1)
    table = maker.draw(heads, size)
    made = RelativeTable.of_codes(table, u, int(u.max()) - u)
    return dataclasses.replace(made, heads=term.heads)


def _lookup(term: Lookup, maker: _Maker, heads: int, _: torch.dtype) -> Term:
    size = term.table.shape[-1]
    code = maker.integers(size, maker.n, maker.n).to(term.code.dtype)
    return Lookup(table=maker.draw(heads, size), code=code, heads=term.heads)


def _axial(term: Axial, maker: _Maker, heads: int, dtype: torch.dtype) -> Term:
    height, width = maker.window()
    row, column, _width = maker.cells()
    rows = maker.draw(heads, maker.n, height).to(dtype)
    columns = maker.draw(heads, maker.n, width).to(dtype)
    return Axial(rel_h=rows, rel_w=columns, y=row, x=column, heads=term.heads)


def _regions(term: Regions, maker: _Maker, heads: int, _: torch.dtype) -> Term:
    ids = torch.arange(maker.n, device=maker.device) * 2 // max(1, maker.n)
    twos = are_in_twos(ids)
    return Regions(ids=ids.to(term.ids.dtype), value=term.value, heads=term.heads, pairs=twos)


def _diagonal(term: Diagonal, maker: _Maker, heads: int, _: torch.dtype) -> Term:
    return Diagonal(values=maker.draw(heads, maker.n), heads=term.heads)


def _dense(term: Dense, maker: _Maker, heads: int, dtype: torch.dtype) -> Term:
    return Dense(bias=maker.draw(heads, maker.n, maker.n).to(dtype), heads=term.heads)


_MAKERS: dict[type[Term], Callable[..., Term]] = {
    Alibi: _alibi,
    Axial: _axial,
    Dense: _dense,
    Diagonal: _diagonal,
    KeyBias: _key_bias,
    Lookup: _lookup,
    LowRank: _low_rank,
    Regions: _regions,
    RelativeTable: _relative_table,
}
