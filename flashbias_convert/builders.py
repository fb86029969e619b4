"""Builders: functions that make a term from the input of a call.

A plan stores a builder by its name, and the recipe's forward hands it its inputs, so that a file
says which of its terms are made anew in every call, and from what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .terms import Alibi, Axial, KeyBias, Term


@dataclass(frozen=True)
class Builder:
    """A function that makes a term, and what it takes the place of.

    Attributes:
        make: called with keyword arguments, the inputs of the call.
        replaces: kinds of planned terms that are left out where it is used.
    """

    make: Callable[..., Term]
    replaces: tuple[str, ...] = ()


def padded_alibi(*, slopes: Tensor, places: Tensor, start: int | Tensor, n: int) -> Alibi:
    """ALiBi whose positions count the tokens of each row and skip its padding (BLOOM).

    Args:
        slopes: fp32, shape (H,).
        places: int32 (B, M), the place of each key in its row.
        start: place of the first query among the keys.
        n: number of queries.
    """
    if isinstance(start, Tensor):
        pos_q = places.index_select(-1, start + torch.arange(n, device=places.device))
    else:
        pos_q = places[:, start : start + n]
    return Alibi(slopes=slopes, pos_q=pos_q.contiguous(), pos_k=places.contiguous())


def rounded_alibi(*, slopes: Tensor, places: Tensor, unit: float, dtype: torch.dtype) -> KeyBias:
    """ALiBi as Falcon computes it: slopes, positions and products in bfloat16.

    Args:
        slopes: fp32, shape (H,), times `unit`.
        places: int32 (B, M), the place of each key in its row, from 1 on.
        unit: what the scores are multiplied with after the bias was added.
        dtype: of the model.
    """
    rounded = (slopes / unit).bfloat16()[:, None] * (places[:, None, :] - 1)  # (B, H, M)
    return KeyBias(values=rounded.to(dtype).float() * unit)


def axial_rows(*, q: Tensor, rel_h: Tensor, rel_w: Tensor, y: Tensor, x: Tensor) -> Axial:
    """Rows of decomposed relative positions: products of the queries with two tables (SAM, ViTDet).

    Args:
        q: shape (*batch, H, N, D), not scaled.
        rel_h: shape (N, kH, D): for each query what belongs to each row of keys.
        rel_w: shape (N, kW, D): likewise for columns.
        y, x: integers (M,), row and column of each key.
    """
    return Axial(
        rel_h=torch.einsum("...nd,nkd->...nk", q, rel_h.to(q.dtype)),
        rel_w=torch.einsum("...nd,nkd->...nk", q, rel_w.to(q.dtype)),
        y=y,
        x=x,
    )


BUILDERS: dict[str, Builder] = {
    "padded_alibi": Builder(padded_alibi, replaces=(Alibi.kind,)),
    "rounded_alibi": Builder(rounded_alibi, replaces=(Alibi.kind,)),
    "axial_rows": Builder(axial_rows),
}


def find_builder(name: str) -> Builder:
    """The builder of that name; raises ValueError if there is none."""
    if name not in BUILDERS:
        raise ValueError(f"unknown builder {name!r}; is the file newer?")
    return BUILDERS[name]


def build(name: str, inputs: dict[str, Any]) -> Term:
    """The term that a builder makes of the inputs of a call."""
    return find_builder(name).make(**inputs)
