"""Follow scores from the product of queries and keys to the softmax, operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .fused import KERNELS, OnFused, fused_call
from .operations import SHAPES, after, name_of, reshaping
from .scores import Product, Scores

_PRODUCTS = {"bmm": (0, 1), "baddbmm": (1, 2)}
_SOFTMAX = {"_softmax", "_safe_softmax"}


#: told about the scores that went into a softmax, their values and the dimension; the scores are
#: None where they were not followed
OnSoftmax = Callable[[Scores | None, Tensor, int], None]


class Watcher(TorchDispatchMode):
    """Follows every product of two tensors that are no weights.

    Args:
        path: gives the names of the running modules.
        parameters: a product with one of them is a linear layer.
        on_fused, on_softmax: told about what is found.
    """

    def __init__(
        self,
        path: Callable[[], tuple[str, ...]],
        parameters: Sequence[Tensor],
        on_fused: OnFused,
        on_softmax: OnSoftmax,
    ) -> None:
        super().__init__()
        self._path, self._on_fused, self._on_softmax = path, on_fused, on_softmax
        self._weights = {p.untyped_storage().data_ptr() for p in parameters}
        self._scores = WeakTensorKeyDictionary()
        self._factors = WeakTensorKeyDictionary()
        #: view -> what it was cut from, and how
        self._above = WeakTensorKeyDictionary()
        self._resting = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Nothing is followed inside."""
        before, self._resting = self._resting, True
        try:
            yield
        finally:
            self._resting = before

    def factor(self, *tensors: Tensor) -> float:
        """The product of the numbers that the tensors were multiplied with."""
        total = 1.0
        for tensor in tensors:
            total *= self._factors.get(tensor, 1.0)
        return total

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if self._resting:
            return func(*args, **options)
        at = self._tracked(args)
        in_place = func._schema.is_mutable
        if in_place:
            self._keep_products(args)
        out = func(*args, **options)
        with self.resting():
            self._follow(func, at, args, options, out)
        return out

    # -- one operation -----------------------------------------------------------------------

    def _follow(
        self, func: Any, at: int | None, args: Any, options: dict[str, Any], out: Any
    ) -> None:
        name = name_of(func)
        if name in _SOFTMAX:
            self._on_softmax(self._scores.get(args[0]), args[0], args[1])
        elif name in _PRODUCTS:
            self._begin(name, args, options, out)
        elif name.startswith(KERNELS):
            self._fused(func, args, options)
        elif name == "copy" and func._schema.is_mutable:
            self._copied(args)
        elif at is not None:
            self._go_on(func, at, args, options, out)
        else:
            self._scaled(name, args, out, options, func)

    def _tracked(self, args: Any) -> int | None:
        """Position of the scores; of two, those that were made from the right product."""
        found = [
            (i, self._scores[a])
            for i, a in enumerate(args)
            if isinstance(a, Tensor) and a in self._scores
        ]
        if not found:
            return None
        largest = max(scores.product.numel() for _, scores in found)

        def rank(entry: tuple[int, Scores]) -> tuple[bool, int, int]:
            source = entry[1].source
            # a product of all queries and keys, not of one axis; then the longer sum; the first
            return source.numel >= largest, int(source.q.shape[-1]), -entry[0]

        return max(found, key=rank)[0]

    def _go_on(self, func: Any, at: int, args: Any, options: dict[str, Any], out: Any) -> None:
        before = self._scores[args[at]]
        if isinstance(out, list | tuple):
            if name_of(func) in SHAPES:
                for i, one in enumerate(out):
                    self._scores[one] = before.reshaped(_part(reshaping(func, args, options), i))
            return
        if not isinstance(out, Tensor):
            return
        try:
            scores = after(before, func, at, args, options)
        except RuntimeError:  # shapes that do not go together: nobody knows
            scores = None
        if scores is None or scores.shape != out.shape:
            self._scores.pop(out, None)
            return
        self._scores[out] = scores
        if name_of(func) in SHAPES:
            self._above[out] = (args[0], reshaping(func, args, options))
        elif func._schema.is_mutable:
            self._tell_above(out, scores)

    def _tell_above(self, part: Tensor, scores: Scores) -> None:
        """A view was changed in place: so was what it was cut from."""
        while part in self._above:
            whole, region = self._above[part]
            known = self._scores.get(whole)
            if known is None:
                return
            scores = known.patched_by(region, scores)
            self._scores[whole] = scores
            part = whole

    def _copied(self, args: Any) -> None:
        target, source = args[0], args[1]
        if source in self._scores and source.shape == target.shape:
            self._scores[target] = self._scores[source]
            self._tell_above(target, self._scores[source])
        elif target in self._scores:
            del self._scores[target]

    def _keep_products(self, args: Any) -> None:
        """Before a change in place: products that share the memory are copied."""
        target = args[0] if args and isinstance(args[0], Tensor) else None
        if target is None:
            return
        storage = target.untyped_storage().data_ptr()
        touched = [a for a in args if isinstance(a, Tensor)]
        while target in self._above:  # and whatever it was cut from
            target = self._above[target][0]
            touched.append(target)
        with self.resting():
            for tensor in touched:
                scores = self._scores.get(tensor)
                if scores is not None and scores.product.untyped_storage().data_ptr() == storage:
                    self._scores[tensor] = scores.on_a_copy()

    # -- where scores begin ------------------------------------------------------------------

    def _begin(self, name: str, args: Any, options: dict[str, Any], out: Tensor) -> None:
        q, k = (args[i] for i in _PRODUCTS[name])
        if any(t.untyped_storage().data_ptr() in self._weights for t in (q, k)):
            return  # a linear layer
        if any(t in self._scores for t in (q, k)):
            return  # scores that are mixed between heads are scores no longer
        source = Product(q, k.mT, out.numel(), self._path(), self.factor(q, k))
        if name == "bmm":
            self._scores[out] = Scores.of(source, out)
            return
        beta, alpha = (float(options.get(key, 1)) for key in ("beta", "alpha"))
        scores = Scores.of(source, torch.bmm(q, k))
        scores = scores if alpha == 1.0 else scores.times(alpha)
        self._scores[out] = scores.plus(args[0], beta) if beta else scores

    def _scaled(self, name: str, args: Any, out: Any, options: dict[str, Any], func: Any) -> None:
        """Remember numbers that q or k is multiplied with."""
        if not args or not isinstance(args[0], Tensor) or not isinstance(out, Tensor | list):
            return
        known = self._factors.get(args[0], 1.0)
        if name in ("mul", "div") and isinstance(out, Tensor) and out.dim() > 2:
            number = _number(args[1])
            if number:
                self._factors[out] = known * (number if name == "mul" else 1 / number)
        elif known != 1.0 and (name in SHAPES or name in ("clone", "_to_copy")):
            for one in [out] if isinstance(out, Tensor) else out:
                self._factors[one] = known

    def _fused(self, func: Any, args: Any, options: dict[str, Any]) -> None:
        """A fused kernel that was called from within torch."""
        names = [argument.name for argument in func._schema.arguments]
        self._on_fused(fused_call(names, args, options, self.factor))


def _part(split: Callable[[Tensor], Any], i: int) -> Callable[[Tensor], Tensor]:
    return lambda whole: split(whole)[i]


def _number(value: Any) -> float | None:
    """A number, or the one number of a tensor."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and value.is_floating_point() else None
    return float(value) if isinstance(value, int | float) else None
