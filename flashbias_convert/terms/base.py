"""What every term of a score bias has in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from .constants import integers, kept


def check_sizes(kind: str, sizes: Iterable[tuple[str, int, str]], n: int, m: int) -> None:
    """Raise ValueError unless a call of n queries and m keys has the sizes of a term."""
    expected = {"queries": n, "keys": m}
    for name, size, axis in sizes:
        if size != expected[axis]:  # a message made before would fix the sizes of a trace
            raise ValueError(f"{kind}: {name} is for {size} {axis}, the call has {expected[axis]}")


def pinned_tensor(**kwargs: Any) -> Any:
    """A tensor field whose dtype no cast changes: integers, positions, fp32 factors."""
    return field(metadata={"tensor": True, "pinned": True}, **kwargs)


def castable_tensor(**kwargs: Any) -> Any:
    """A floating-point tensor field that follows its model's dtype."""
    return field(metadata={"tensor": True, "pinned": False}, **kwargs)


def cast(tensor: Tensor, pinned: bool, device: Any, dtype: torch.dtype | None) -> Tensor:
    """Move one tensor; a pinned or an integer tensor keeps its dtype."""
    keep = pinned or not tensor.is_floating_point()
    return tensor.to(device=device, dtype=tensor.dtype if keep else dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class Term:
    """One summand of a bias on attention scores.

    Shapes use B batch, H heads, N queries, M keys. ``*batch`` stands for any number of leading
    dimensions; they broadcast, right-aligned, against the batch dimensions of q.

    Attributes:
        heads: the heads that this term acts on, in the order of its own head dimension.
            None means all heads.
        row_scale: optional gate, shape (*batch, H or 1, N or 1), that multiplies row i of this
            term (WavLM's gate, the weight per point of a PDE solver). Always fp32.
    """

    kind: ClassVar[str]

    heads: tuple[int, ...] | None = None
    row_scale: Tensor | None = pinned_tensor(default=None)

    # -- the two things a term knows ------------------------------------------------------

    def dense_term(self, n: int, m: int, query_start: int, dtype: torch.dtype) -> Tensor:
        """The term without its row scale, shape (*batch, H or 1, n, m)."""
        raise NotImplementedError

    def dense(
        self,
        n: int,
        m: int,
        *,
        query_start: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The matrix that this term adds to the scores.

        Args:
            n: number of queries.
            m: number of keys.
            query_start: position of the first query among the keys; default m - n.
            dtype: dtype of the result; float64 for a reference.

        Returns:
            Tensor of shape (*batch, H or 1, n, m), where H counts this term's own heads.

        Raises:
            ValueError: the term's tensors are for other sizes.
        """
        start = m - n if query_start is None else query_start
        self.check_sizes(n, m)
        out = self.dense_term(n, m, start, dtype)
        if self.row_scale is not None:
            out = out * self.row_scale.to(dtype)[..., None]
        return out

    def sizes(self) -> list[tuple[str, int, str]]:
        """Sizes that this term fixes: (tensor name, size, "queries" or "keys")."""
        return []

    def fixed_sizes(self) -> list[tuple[str, int, str]]:
        """As `sizes`, and what `row_scale` fixes."""
        if self.row_scale is None or self.row_scale.shape[-1] == 1:
            return self.sizes()
        return [*self.sizes(), ("row_scale", self.row_scale.shape[-1], "queries")]

    def check_sizes(self, n: int, m: int) -> None:
        """Raise ValueError unless this term fits n queries and m keys. Reads shapes only."""
        check_sizes(self.kind, self.fixed_sizes(), n, m)

    def batch_shape(self) -> tuple[int, ...]:
        """Broadcast shape of the leading dimensions of all tensors of this term."""
        raise NotImplementedError

    def _row_scale_batch(self) -> tuple[int, ...]:
        return () if self.row_scale is None else tuple(self.row_scale.shape[:-2])

    # -- fields ----------------------------------------------------------------------------

    _tensor_fields: ClassVar[dict[str, bool]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # found here and kept: torch.compile cannot look into the fields of a class
        own = {k: f for k, f in vars(cls).items() if isinstance(f, dataclasses.Field)}
        fields = {f.name: f for f in dataclasses.fields(cls.__mro__[1])} | own
        cls._tensor_fields = {
            name: bool(f.metadata["pinned"])
            for name, f in fields.items()
            if f.metadata.get("tensor")
        }

    @classmethod
    def tensor_fields(cls) -> dict[str, bool]:
        """Names of the tensor fields, and whether each is pinned to its dtype."""
        return cls._tensor_fields

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by field name."""
        found = {name: getattr(self, name) for name in self.tensor_fields()}
        return {name: value for name, value in found.items() if value is not None}

    def static(self) -> dict[str, Any]:
        """Everything that is not a tensor, as plain JSON values."""
        names = [f.name for f in dataclasses.fields(self) if not f.metadata.get("tensor")]
        values = {name: getattr(self, name) for name in names}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_state(cls, static: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Build a term from `static()` and `tensors()`."""
        values: dict[str, Any] = dict(tensors)
        values |= {k: tuple(v) if isinstance(v, list) else v for k, v in static.items()}
        return cls(**values)

    def map_tensors(self, fn: Callable[[str, Tensor], Tensor]) -> Self:
        """A copy whose tensors are ``fn(field name, tensor)``."""
        mapped: dict[str, Any] = {k: fn(k, v) for k, v in self.tensors().items()}
        return dataclasses.replace(self, **mapped)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Self:
        """A copy on `device`; `dtype` reaches only tensors that may be rounded."""
        pinned = self.tensor_fields()
        return self.map_tensors(lambda name, t: cast(t, pinned[name], device, dtype))

    # -- heads -----------------------------------------------------------------------------

    #: tensor field -> position of its head dimension, counted from the end (negative).
    head_dims: ClassVar[dict[str, int]] = {}

    def num_own_heads(self) -> int:
        """Size of the head dimension of this term's tensors (1 when all heads share them)."""
        dims = {"row_scale": -2, **self.head_dims}
        sizes = {int(t.shape[dims[k]]) for k, t in self.tensors().items() if k in dims}
        sizes.discard(1)
        if len(sizes) > 1:
            raise ValueError(f"{self.kind}: tensors disagree on the number of heads: {sizes}")
        return sizes.pop() if sizes else 1

    def _select_own(self, index: Sequence[int]) -> Self:
        """Keep the given positions of this term's own head dimension (shared ones stay)."""
        dims = {"row_scale": -2, **self.head_dims}

        picked: dict[str, Any] = {}
        for name, tensor in self.tensors().items():
            if name in dims and tensor.shape[dims[name]] > 1:
                where = kept(integers, tuple(index), torch.int64, tensor.device)
                tensor = tensor.index_select(tensor.dim() + dims[name], where)
            picked[name] = tensor
        return dataclasses.replace(self, **picked, **self._select_static(index))

    def _select_static(self, index: Sequence[int]) -> dict[str, Any]:
        """Per-head fields that are not tensors, for the heads at `index`."""
        return {}

    def select_heads(self, wanted: Sequence[int]) -> Self | None:
        """This term for the heads `wanted`, renumbered 0, 1, ...; None if it touches none."""
        if self.heads is None:
            return self._select_own(wanted)
        pairs = [(new, self.heads.index(h)) for new, h in enumerate(wanted) if h in self.heads]
        if not pairs:
            return None
        chosen = self._select_own([own for _, own in pairs])
        covers_all = len(pairs) == len(wanted)
        return dataclasses.replace(chosen, heads=None if covers_all else tuple(n for n, _ in pairs))


def joint_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """What some shapes broadcast to; most often there is but one, which costs nothing here.

    Raises:
        RuntimeError: they do not broadcast.
    """
    own = [shape for shape in shapes if shape]
    if not own:
        return ()
    if all(shape == own[0] for shape in own[1:]):
        return own[0]
    return tuple(torch.broadcast_shapes(*own))


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds.

    Not for messages that say the size of a call: torch.compile would compile for that size alone.
    """
    if not condition:
        raise ValueError(message)


def require_shape(name: str, tensor: Tensor, min_dims: int, layout: str) -> None:
    """Raise ValueError unless `tensor` has at least `min_dims` dimensions."""
    if tensor.dim() < min_dims:
        raise ValueError(f"{name} must have shape {layout}, got {tuple(tensor.shape)}")


def require_integer(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless `tensor` holds integers."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {tensor.dtype}")
