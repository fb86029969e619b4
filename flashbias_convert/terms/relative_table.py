"""A bias that looks up a table at the sum of a query code and a key code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Term, joint_shape, pinned_tensor, require, require_integer, require_shape


@dataclass(frozen=True, eq=False, kw_only=True)
class RelativeTable(Term):
    """Adds ``table[h, u[i] + v[j]]``.

    Every bias of a relative position has this form: 1-D buckets (T5), 2-D windows (Swin, SwinV2,
    BEiT with its CLS row and column), 3-D windows (Video Swin, Pangu). The table stays exact, and
    small: T entries a head instead of N x M.

    Attributes:
        table: fp32, shape (*batch, H or 1, T).
        u: integers, shape (N,), the query codes.
        v: integers, shape (M,), the key codes; 0 <= u[i] + v[j] < T for all i, j.
        by_distance: what is known of the codes: 1 if u[i] + v[j] = c + j - i with one c for all,
            -1 if it is c + i - j, and the table has `MARGIN` more entries before those of any i, j
            and after them; 0 if nothing is. A kernel for distances is faster, and trusts it; see
            `of_codes`.
        pairs: whether keys come in twos whose codes are one apart, v[2 j + 1] = v[2 j] - 1 >= 0,
            as in windows of an even width. A kernel reads the entries of both at once, and trusts
            it; see `are_pairs`.
    """

    #: tokens past the end that a kernel has in a tile with the last ones
    MARGIN: ClassVar[int] = 64

    kind: ClassVar[str] = "relative_table"
    head_dims: ClassVar[dict[str, int]] = {"table": -2}

    table: Tensor = pinned_tensor()
    u: Tensor = pinned_tensor()
    v: Tensor = pinned_tensor()
    by_distance: int = 0
    pairs: bool = False

    @classmethod
    def of_codes(cls, table: Tensor, u: Tensor, v: Tensor, step: int = 0) -> RelativeTable:
        """The term of these codes: with a margin around its table if they count distances.

        Reads the codes: synchronises.

        Args:
            table: shape (*batch, H or 1, T).
            u, v: its codes.
            step: 1 if u[i] + v[j] grows with the key, -1 if it grows with the query, 0 if codes do
                not count distances, or are not to be taken for such.
        """
        if step:
            table = torch.nn.functional.pad(table, (cls.MARGIN, cls.MARGIN))
            u, v = u.int() + cls.MARGIN, v.int()
        return cls(table=table, u=u, v=v, by_distance=step, pairs=step == 0 and are_pairs(v))

    def __post_init__(self) -> None:
        require(self.by_distance in (-1, 0, 1), "by_distance must be -1, 0 or 1")
        require_shape("table", self.table, 2, "(*batch, H, T)")
        for name in ("u", "v"):
            codes = getattr(self, name)
            require_integer(name, codes)
            if codes.dim() != 1:
                raise ValueError(f"{name} must be one-dimensional, got {tuple(codes.shape)}")

    @property
    def entries(self) -> int:
        """Entries of the table without its margin."""
        return self.table.shape[-1] - (2 * self.MARGIN if self.by_distance else 0)

    def check_codes(self) -> None:
        """Raise ValueError if codes point outside the table, or are not what is said of them.

        Reads the codes: synchronises.
        """
        margin = self.MARGIN if self.by_distance else 0
        low = int(self.u.min()) + int(self.v.min()) - margin
        high = int(self.u.max()) + int(self.v.max()) + margin
        size = self.table.shape[-1]
        require(
            low >= 0 and high < size,
            f"relative codes reach from {low} to {high}, but the table has {size} entries",
        )
        require(
            self.by_distance in (0, distance_direction(self.u, self.v)),
            f"by_distance is {self.by_distance}, but the codes do not count distances that way",
        )
        require(
            not self.pairs or are_pairs(self.v),
            "pairs is true, but the codes of keys are not one apart by twos",
        )

    def sizes(self) -> list[tuple[str, int, str]]:
        return [("u", self.u.shape[0], "queries"), ("v", self.v.shape[0], "keys")]

    def dense_term(self, n: int, m: int, query_start: int, dtype: torch.dtype) -> Tensor:
        index = self.u.long()[:, None] + self.v.long()[None, :]
        return self.table.to(dtype)[..., index]

    def batch_shape(self) -> tuple[int, ...]:
        own = tuple(self.table.shape[:-2])
        return joint_shape(own, self._row_scale_batch())


def distance_direction(u: Tensor, v: Tensor) -> int:
    """The `by_distance` of these codes. Reads them: synchronises.

    Args:
        u: integers, shape (N,).
        v: integers, shape (M,).
    """
    for step in (1, -1):
        if bool((u.diff() == -step).all()) and bool((v.diff() == step).all()):
            return step
    return 0


def are_pairs(v: Tensor) -> bool:
    """Whether key codes are `RelativeTable.pairs`. Reads them: synchronises.

    Args:
        v: integers, shape (M,).
    """
    if len(v) % 2:
        return False
    even, odd = v.long().view(-1, 2).unbind(-1)  # small integers would wrap
    return bool(((even - odd == 1) & (odd >= 0)).all())
