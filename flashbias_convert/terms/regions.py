"""A constant for every pair of tokens from different regions, such as Swin's shift mask."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Term, joint_shape, pinned_tensor, require, require_integer, require_shape


@dataclass(frozen=True, eq=False, kw_only=True)
class Regions(Term):
    """Adds `value` to score (i, j) where ``ids[i] != key_ids[j]``, and 0 elsewhere.

    Swin's shift mask is value -100 (finite, so it stays an addition and is never turned into
    minus infinity) with one row of ids per window, instead of an (nW, N, N) tensor.

    Attributes:
        ids: small integers, shape (*batch, N): for windows (nW, N).
        key_ids: small integers, shape (*batch, M); default `ids`.
        value: what a pair of different regions adds.
        pairs: whether keys come in twos of one region, as in windows of an even width on a map that
            is shifted by an even number. A kernel compares both at once, and trusts it; see
            `are_in_twos`.
    """

    kind: ClassVar[str] = "regions"

    ids: Tensor = pinned_tensor()
    key_ids: Tensor | None = pinned_tensor(default=None)
    value: float = -100.0
    pairs: bool = False

    def __post_init__(self) -> None:
        require_shape("ids", self.ids, 1, "(*batch, N)")
        require_integer("ids", self.ids)
        if self.key_ids is not None:
            require_shape("key_ids", self.key_ids, 1, "(*batch, M)")
            require_integer("key_ids", self.key_ids)
        known = isinstance(self.value, int | float) and math.isfinite(self.value)
        require(known, f"the value of regions must be a finite number, got {self.value!r}")

    def check_codes(self) -> None:
        """Raise ValueError if keys are not the `pairs` that they are said to be.

        Reads the ids: synchronises.
        """
        keys = self.ids if self.key_ids is None else self.key_ids
        known = not self.pairs or are_in_twos(keys)
        require(known, "pairs is true, but keys are not in twos of one region")

    def sizes(self) -> list[tuple[str, int, str]]:
        keys = self.ids if self.key_ids is None else self.key_ids
        return [
            ("ids", self.ids.shape[-1], "queries"),
            ("key_ids", keys.shape[-1], "keys"),
        ]

    def dense_term(self, n: int, m: int, query_start: int, dtype: torch.dtype) -> Tensor:
        key_ids = self.ids if self.key_ids is None else self.key_ids
        differ = self.ids[..., :, None] != key_ids[..., None, :]
        return (differ.to(dtype) * self.value)[..., None, :, :]

    def batch_shape(self) -> tuple[int, ...]:
        shapes = [tuple(self.ids.shape[:-1]), self._row_scale_batch()]
        if self.key_ids is not None:
            shapes.append(tuple(self.key_ids.shape[:-1]))
        return joint_shape(*shapes)


def are_in_twos(ids: Tensor) -> bool:
    """Whether the ids of keys are `Regions.pairs`. Reads them: synchronises.

    Args:
        ids: integers, shape (*batch, M).
    """
    return ids.shape[-1] % 2 == 0 and torch.equal(ids[..., ::2], ids[..., 1::2])
