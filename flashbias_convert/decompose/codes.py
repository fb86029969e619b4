"""Integer codes u (N,) and v (M,) whose sum says which relative position a cell has.

On a grid with coordinates x, the code of a query is its coordinates in a mixed radix and the code
of a key the mirrored coordinates: then u[i] + v[j] numbers the difference x[i] - x[j], without
collisions, and a table of one entry per difference holds the whole bias.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DecompositionError

#: Entries that a table may have: 4 MiB a head. An index beyond it is garbage, not a position.
MAX_TABLE = 2**20


@dataclass(frozen=True, eq=False)
class Codes:
    """Codes from 0 on, and the size of the table that they point into.

    Attributes:
        u: int64, shape (N,), smallest entry 0.
        v: int64, shape (M,), smallest entry 0.
    """

    u: Tensor
    v: Tensor

    @property
    def size(self) -> int:
        """T, one more than the largest sum."""
        return int(self.u.max() + self.v.max()) + 1

    def index(self) -> Tensor:
        """u[i] + v[j], shape (N, M)."""
        return self.u[:, None] + self.v[None, :]

    def with_special_token(self) -> Codes:
        """Put one token in front that has no position, such as BEiT's CLS.

        Its row, its column and its corner get entries of their own behind the table: whatever
        they hold is reproduced, and nothing collides.
        """
        own, u_max, v_max = self.size, int(self.u.max()), int(self.v.max())
        assert own > max(u_max, v_max)
        row = self.u.new_tensor([own])  # its row: own ... own + v_max
        column = self.v.new_tensor([own + v_max + 1])  # its column: from there on, u_max more
        return Codes(torch.cat([row, self.u]), torch.cat([column, self.v]))


# -- from an index matrix that the model holds -------------------------------------------------


def check_index(index: Tensor, n: int, m: int, size: int | None = None, name: str = "") -> Tensor:
    """Refuse an index matrix that cannot be one.

    Index buffers are often left out of checkpoints and rebuilt; a model made without memory
    (on the meta device) can carry whatever the memory held before.

    Args:
        index: integers, shape (N, M), or flattened.
        n: number of queries.
        m: number of keys.
        size: entries of the table that it points into, if known.
        name: the site, for the message.

    Returns:
        int64, shape (N, M).

    Raises:
        DecompositionError: not integers, another shape, or entries out of range.
    """
    what = f"the relative position index of {name}" if name else "the relative position index"
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise DecompositionError(f"{what} must hold integers, got {index.dtype}")
    if tuple(index.shape) not in ((n, m), (n * m,)):
        raise DecompositionError(
            f"{what} must have shape {(n, m)}, got {tuple(index.shape)}",
            "has the window or image size changed since?",
        )
    limit = MAX_TABLE if size is None else size
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= limit:
        raise DecompositionError(
            f"{what} reaches from {low} to {high}, expected 0 to {limit - 1}",
            "a buffer that no checkpoint holds was never filled: build the model on a real device",
        )
    return index.long().reshape(n, m)


def codes_from_index(index: Tensor) -> Codes | None:
    """Write a checked index as u[i] + v[j], with or without one special token in front.

    Returns:
        The codes, or None where the index is not additive (absolute offsets, buckets).
    """
    plain = _separate(index)
    if plain is not None or min(index.shape) < 2:
        return plain
    inner = _separate(index[1:, 1:])
    return None if inner is None else inner.with_special_token()


def _separate(index: Tensor) -> Codes | None:
    u, v = index[:, 0], index[0] - index[0, 0]
    if not torch.equal(u[:, None] + v[None, :], index):
        return None
    return Codes(u - u.min(), v - v.min())


# -- from the shape alone ------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Grid:
    """A guess: queries and keys lie on grids of these shapes.

    Attributes:
        size: entries of the table; guesses are sorted by it.
        special: number of tokens in front that have no position, 0 or 1.
        queries: shape of the query grid.
        keys: shape of the key grid.
        stride: keys between two neighbouring queries.
    """

    size: int
    special: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    stride: int

    def codes(self, device: torch.device) -> Codes:
        """The codes of this guess."""
        spans = _spans(self.queries, self.keys, self.stride)
        weights = [math.prod(spans[d + 1 :]) for d in range(len(spans))]
        u = torch.zeros(1, dtype=torch.int64, device=device)
        v = torch.zeros(1, dtype=torch.int64, device=device)
        for weight, q, k in zip(weights, self.queries, self.keys, strict=True):
            along_q = torch.arange(q, device=device) * self.stride * weight
            along_k = torch.arange(k - 1, -1, -1, device=device) * weight
            u = (u[:, None] + along_q).flatten()
            v = (v[:, None] + along_k).flatten()
        plain = Codes(u, v)
        return plain.with_special_token() if self.special else plain


def grids(n: int, m: int) -> list[Grid]:
    """All guesses for an (n, m) matrix whose table is smaller than the matrix, smallest first.

    Square matrices: 1-D, 2-D and 3-D grids. Others: 1-D and 2-D grids of queries and keys that
    overlap (HAT) or skip (LeViT's stride of 2). Each with and without a special token.
    """
    found = set()
    for special in (0, 1):
        if min(n, m) <= special:
            continue
        for queries, keys, stride in _shapes(n - special, m - special):
            size = math.prod(_spans(queries, keys, stride))
            if special:  # as in Codes.with_special_token
                v_max = _largest_code(keys, _spans(queries, keys, stride))
                size = 2 * size + v_max + 2
            if size < n * m and size <= MAX_TABLE:
                found.add(Grid(size, special, queries, keys, stride))
    return sorted(found)


def _spans(queries: tuple[int, ...], keys: tuple[int, ...], stride: int) -> list[int]:
    """Number of different offsets along each axis."""
    return [stride * (q - 1) + k for q, k in zip(queries, keys, strict=True)]


def _largest_code(shape: tuple[int, ...], spans: list[int]) -> int:
    return sum((s - 1) * math.prod(spans[d + 1 :]) for d, s in enumerate(shape))


def _shapes(n: int, m: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    if n == m:
        for dims in (1, 2, 3):
            for shape in _factorisations(n, dims):
                if dims == 1 or min(shape) > 1:  # else the same as fewer dimensions
                    yield shape, shape, 1
        return
    for dims, stride in itertools.product((1, 2), (1, 2)):
        for queries in _factorisations(n, dims):
            for keys in _factorisations(m, dims):
                if dims == 1 or all(max(q, k) > 1 for q, k in zip(queries, keys, strict=True)):
                    yield queries, keys, stride


def _factorisations(n: int, dims: int) -> Iterator[tuple[int, ...]]:
    """Ordered tuples of `dims` factors whose product is n."""
    if dims == 1:
        yield (n,)
        return
    for first in range(1, n + 1):
        if n % first == 0:
            for rest in _factorisations(n // first, dims - 1):
                yield (first, *rest)
