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

from .terms import Alibi, Axial, KeyBias, RelativeTable, Term


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


def cls_window_table(*, table: Tensor, window: tuple[int, int]) -> RelativeTable:
    """BEiT's bias of a window of patches behind a class token, without its (N, N) matrix.

    Args:
        table: shape (T + 3, H): an entry for each of the T = (2 Wh - 1)(2 Ww - 1) offsets, row by
            row, then those of the class token: its row, its column, and where they cross.
        window: (Wh, Ww).

    Returns:
        A term for 1 + Wh Ww queries and keys, with an fp32 table, or fp64 for one of fp64.
    """
    (height, width), span = window, 2 * window[1] - 1
    size = (2 * height - 1) * span
    rows = torch.arange(height, dtype=torch.int32, device=table.device)
    columns = torch.arange(width, dtype=torch.int32, device=table.device)
    # offsets count from the last key to the first; the class token has codes of its own behind
    # them: its row takes entries size ..., its column those after, and the last is the crossing
    u = (rows[:, None] * span + columns).flatten()
    largest = (height - 1) * span + width - 1
    column = size + largest + 1
    wide = table.to(torch.promote_types(table.dtype, torch.float32)).T  # (H, T + 3)
    row, col, corner = wide[:, -3:].unsqueeze(-1).unbind(1)  # (H, 1) each
    rest = (row.expand(-1, largest + 1), col.expand(-1, size), corner)
    return RelativeTable(
        table=torch.cat([wide[:, :-3], *rest], dim=-1),
        u=torch.cat([u.new_tensor([size]), u]),
        v=torch.cat([u.new_tensor([column]), u.flip(0)]),
    )


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
    "cls_window_table": Builder(cls_window_table),
}


def find_builder(name: str) -> Builder:
    """The builder of that name; raises ValueError if there is none."""
    if name not in BUILDERS:
        raise ValueError(f"unknown builder {name!r}; is the file newer?")
    return BUILDERS[name]


def build(name: str, inputs: dict[str, Any]) -> Term:
    """The term that a builder makes of the inputs of a call."""
    return find_builder(name).make(**inputs)
