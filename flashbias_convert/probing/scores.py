"""Attention scores as a function of one product: scale * (q k^T) + addends, in any shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


def lean(tensor: Tensor) -> Tensor:
    """The tensor with size 1 along every dimension in which it only repeats itself."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@dataclass(frozen=True, eq=False)
class Product:
    """Where scores begin: one batched matrix product.

    Attributes:
        q: shape (*batch, N, D).
        k: shape (*batch, M, D).
        numel: numbers in the product.
        path: names of the modules that ran when it was made, outermost first.
        factor: what q and k were multiplied with before.
    """

    q: Tensor
    k: Tensor
    numel: int
    path: tuple[str, ...]
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Scores:
    """What is known of a tensor of scores. All tensors have its shape, mostly by repetition.

    Attributes:
        source: the product that it was made from.
        product: that product in the present shape, as it was computed; a view.
        scale: float64, what the product was multiplied with.
        addends: what was added, each multiplied with whatever came after it, in the dtype in
            which the model added it.
        hidden: bool, cells that a mask has overwritten; None if none has.
        permuted: whether dimensions were exchanged since the product.
        unknown: names of the operations on it that are none of these.
    """

    source: Product
    product: Tensor
    scale: Tensor
    addends: tuple[Tensor, ...] = ()
    hidden: Tensor | None = None
    permuted: bool = False
    unknown: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, source: Product, product: Tensor) -> Scores:
        """The product itself."""
        one = torch.ones((), dtype=torch.float64, device=product.device)
        return cls(source, product, one.expand(product.shape))

    def reshaped(self, change: Callable[[Tensor], Tensor], *, permuted: bool = False) -> Scores:
        """The same change of shape for every part."""
        return replace(
            self,
            product=change(self.product),
            scale=change(self.scale),
            addends=tuple(change(a) for a in self.addends),
            hidden=None if self.hidden is None else change(self.hidden),
            permuted=self.permuted or permuted,
        )

    def plus(self, other: Any, factor: float = 1.0) -> Scores:
        """factor * other was added."""
        addend = self._lean_operand(other)
        addend = addend if factor == 1.0 else addend * factor
        spread = self if tuple(addend.shape) == tuple(self.shape) else self._spread(addend.shape)
        return replace(spread, addends=(*spread.addends, addend.expand(spread.shape)))

    def times(self, other: Any) -> Scores:
        """It was multiplied with `other`."""
        by = self._lean_operand(other, torch.float64)

        def scaled(part: Tensor) -> Tensor:
            return (lean(part) * by.to(part.dtype)).expand(self.shape)

        return replace(
            self, scale=scaled(self.scale), addends=tuple(scaled(a) for a in self.addends)
        )

    def hiding(self, mask: Tensor) -> Scores:
        """Cells where `mask` is True were overwritten by what no query attends to."""
        mask = lean(mask.expand(self.shape))
        hidden = mask if self.hidden is None else lean(self.hidden) | mask
        return replace(self, hidden=hidden.expand(self.shape))

    def doubtful(self, operation: str) -> Scores:
        """Something happened that is none of the above."""
        return replace(self, unknown=(*self.unknown, operation))

    def patched_by(self, region: Callable[[Tensor], Tensor], inner: Scores) -> Scores:
        """A part of it, which `region` cuts out, has become `inner`."""

        def filled(whole: Tensor, part: Tensor) -> Tensor:
            whole = whole.clone(memory_format=torch.contiguous_format)
            region(whole).copy_(part)
            return whole

        old = [filled(a, torch.zeros((), dtype=a.dtype)) for a in self.addends]
        new = [filled(a.new_zeros(self.shape), a) for a in inner.addends]
        hidden = self.hidden
        if hidden is not None or inner.hidden is not None:
            none = torch.zeros((), dtype=torch.bool, device=self.product.device)
            before = none.expand(self.shape) if hidden is None else hidden
            hidden = filled(before, none if inner.hidden is None else inner.hidden)
        return replace(
            self,
            scale=filled(self.scale, inner.scale),
            addends=(*old, *new),
            hidden=hidden,
            unknown=(*self.unknown, *(u for u in inner.unknown if u not in self.unknown)),
        )

    def on_a_copy(self) -> Scores:
        """The same, safe from changes in place of the tensor that it describes."""
        return replace(self, product=self.product.clone())

    @property
    def shape(self) -> torch.Size:
        """Shape of the scores."""
        return self.product.shape

    def _spread(self, shape: Any) -> Scores:
        """Broadcast against another shape."""
        wide = torch.broadcast_shapes(self.shape, shape)
        return self if wide == self.shape else self.reshaped(lambda part: part.expand(wide))

    def _lean_operand(self, other: Any, number: torch.dtype | None = None) -> Tensor:
        """A number or a tensor in the dtype of the scores, or wider, with all their dimensions.

        Args:
            other: what a model combines with its scores.
            number: dtype of a Python number; default that of the scores.
        """
        if isinstance(other, Tensor):
            dtype = torch.promote_types(other.dtype, self.product.dtype)
            other = other.detach()
        else:
            dtype = number or self.product.dtype
            other = torch.tensor(other, dtype=torch.float64)
        other = other.to(device=self.product.device, dtype=dtype)
        missing = max(0, len(self.shape) - other.dim())
        # what the model changes in place later must not change here
        return lean(other.reshape(*(1,) * missing, *other.shape)).clone()
