"""A bias that is a sum over the two axes of an image, with rows that depend on the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import (
    Term,
    castable_tensor,
    joint_shape,
    pinned_tensor,
    require_integer,
    require_shape,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Axial(Term):
    """Adds ``rel_h[h, i, y[j]] + rel_w[h, i, x[j]]`` (SAM, ViTDet, MViTv2).

    The rows are products of the query with tables of relative positions, so they are made for each
    call: kH + kW numbers per query instead of kH * kW.

    Attributes:
        rel_h: floating point, shape (*batch, H or 1, N, kH).
        rel_w: floating point, shape (*batch, H or 1, N, kW).
        y: integers, shape (M,): the row of each key, below kH.
        x: integers, shape (M,): the column of each key, below kW.
    """

    kind: ClassVar[str] = "axial"
    head_dims: ClassVar[dict[str, int]] = {"rel_h": -3, "rel_w": -3}

    rel_h: Tensor = castable_tensor()
    rel_w: Tensor = castable_tensor()
    y: Tensor = pinned_tensor()
    x: Tensor = pinned_tensor()

    def __post_init__(self) -> None:
        require_shape("rel_h", self.rel_h, 3, "(*batch, H, N, kH)")
        require_shape("rel_w", self.rel_w, 3, "(*batch, H, N, kW)")
        for name in ("y", "x"):
            coordinates = getattr(self, name)
            require_integer(name, coordinates)
            if coordinates.dim() != 1:
                shape = tuple(coordinates.shape)
                raise ValueError(f"{name} must be one-dimensional, got {shape}")

    def sizes(self) -> list[tuple[str, int, str]]:
        return [
            ("rel_h", self.rel_h.shape[-2], "queries"),
            ("rel_w", self.rel_w.shape[-2], "queries"),
            ("y", self.y.shape[0], "keys"),
            ("x", self.x.shape[0], "keys"),
        ]

    def dense_term(self, n: int, m: int, query_start: int, dtype: torch.dtype) -> Tensor:
        rows, columns = self.rel_h.to(dtype), self.rel_w.to(dtype)
        return rows[..., self.y.long()] + columns[..., self.x.long()]

    def batch_shape(self) -> tuple[int, ...]:
        shapes = (tuple(self.rel_h.shape[:-3]), tuple(self.rel_w.shape[:-3]))
        return joint_shape(*shapes, self._row_scale_batch())
