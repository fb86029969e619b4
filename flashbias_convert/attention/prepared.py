"""A bias with its kernel-ready forms, made once and kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from sys import intern
from typing import Any, TypeVar

import torch

from ..terms import ScoreBias, Term
from ..terms.base import check_sizes
from .arguments import broadcasts
from .packing import PackedBias, can_join, join, pack, unsupported
from .training_packing import pack_for_training

T = TypeVar("T")
N = TypeVar("N", int, float)
#: what for ("attention" or "training"), whether in half precision, and for which scale
Form = tuple[str, bool, float | None]


class PreparedBias:
    """A bias whose terms do not change between calls.

    Holds what the operator works out from it, so that a call spends nothing on it; neither does a
    compiled graph, which takes the packed forms as inputs. Make a new one when a tensor of the
    bias changes.

    Args:
        bias: the terms.
        once: it serves one call, so that nothing needs to be kept for others.
    """

    # compiled code would ask the dictionary of an instance whether it hides a method
    __slots__ = (
        "__weakref__", "_alike", "_fleeting", "_forms", "_group", "_kept", "_parts", "bias",
        "flat", "held_by", "is_empty", "requires_grad", "traced",
    )  # fmt: skip

    def __init__(self, bias: ScoreBias, once: bool = False) -> None:
        self.bias = bias
        #: whether it has no terms
        self.is_empty = len(bias.terms) == 0
        self.requires_grad = bias.requires_grad
        #: nothing is kept of it, and what it makes may be of the call's inference mode
        self._fleeting = once
        self._kept: dict[Hashable, Any] = {}
        self._forms: dict[Form, PackedBias] = {}
        #: a bias whose forms serve this one, too, and what they lack
        self._parts: tuple[PreparedBias, tuple[Term, ...]] | None = None
        #: forms that compiled graphs look for
        self.traced: set[Form] = set()
        #: what it has in common with biases whose forms are made together; nothing if they are not
        self._alike = ""
        self._group: _Alike | None = None
        #: the same, and forms that were made of it, in dictionaries alone, see `TracedBias`
        self.flat: dict[Any, Any] = {}
        #: who keeps it, and as which of those that it keeps, see `Holder`
        self.held_by: tuple[weakref.ref[Any], Hashable] | None = None
        # terms that ask for gradients are not frozen, and what a trace makes is not real
        if not (once or self.requires_grad or torch.compiler.is_compiling()):
            self._alike, self._group = _join(self)
            self.flat = {"alike": self._alike, "is_empty": self.is_empty, "forms": {}}

    @classmethod
    def of_calls(cls, bias: ScoreBias) -> PreparedBias:
        """Of terms that come with calls: it keeps its forms, but no compiled graph looks for it."""
        made = cls(bias, once=True)
        made._fleeting = False
        return made

    def joined(self, extra: tuple[Term, ...]) -> PreparedBias:
        """This bias and further terms, which come with a call: only those are packed for it."""
        # owners keep it while a mask stays
        made = PreparedBias.of_calls(ScoreBias(self.bias.terms + extra, self.bias.num_heads))
        if can_join(self.bias, extra):
            made._parts = (self, extra)
        return made

    def __reduce__(self) -> Any:  # copies make their own forms
        return PreparedBias, (self.bias,)

    def packed(self, half: bool, scale: float | None) -> PackedBias:
        """The form that the kernel reads next to q, k and v; see `pack`."""
        return self._form("attention", half, scale)

    def packed_for_training(self, half: bool) -> PackedBias:
        """The form that the operator with gradients takes; see `pack_for_training`.

        Kept only if no gradient flows through it: a graph serves one backward pass.
        """
        if self.requires_grad:
            return pack_for_training(self.bias, half=half)
        return self._form("training", half, None)

    def make_forms(self, forms: Iterable[Form]) -> None:
        """Make these forms now, and have them ready for compiled graphs that look for them."""
        for form in forms:
            if form not in self._forms:
                self._forms[form] = self._make(form)
            for flat in self._flats():
                if form not in flat["forms"]:
                    made = self._forms[form]
                    tensors: dict[Any, Any] = dict(enumerate(made.tensors))
                    flat["forms"][form] = {"spec": made.spec, "count": len(tensors), **tensors}
            self.traced.add(form)

    def _flats(self) -> list[dict[Any, Any]]:
        """`flat`, and the copy of it that its holder may have come to have.

        torch.export puts copies of all dictionaries in their place.
        """
        found = [self.flat] if self.flat else []
        if self.held_by is not None:
            holder, which = self.held_by[0](), self.held_by[1]
            copied = None if holder is None else holder.flat.get(which)
            if copied is not None and copied is not self.flat:
                found.append(copied)
        return found

    def _make(self, form: Form) -> PackedBias:
        """Tensors for calls in every mode; autocast would cast some of them."""
        device = self.bias.device.type
        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
            return self._pack(*form)

    def _pack(self, purpose: str, half: bool, scale: float | None) -> PackedBias:
        if purpose == "training":
            return pack_for_training(self.bias, half=half)
        if self._parts is None:
            return pack(self.bias, half=half, scale=scale)
        own, extra = self._parts
        return join(own.packed(half, scale), extra)

    def _form(self, purpose: str, half: bool, scale: float | None) -> PackedBias:
        if self._alike and torch.compiler.is_compiling():
            scale = None if scale is None else settled(scale)
            make_outside_of_the_graph(self._alike, purpose, half, scale)
        form = (purpose, half, scale)
        if form in self._forms:
            return self._forms[form]
        if torch.compiler.is_compiling() or self._fleeting:
            return self._pack(*form)
        self._forms[form] = self._make(form)
        return self._forms[form]

    def problem(self, half: bool) -> str | None:
        """Why the kernels cannot add this bias, or None if they can.

        Args:
            half: q, k and v are in half precision.
        """
        if torch.compiler.is_compiling():  # the answer is a constant of the graph
            if self._alike:
                return problem_of(self._alike, half)
            return unsupported(self.bias, half=half)
        return self._keep(("problem", half), lambda: unsupported(self.bias, half=half))

    def check_fits(self, batch: tuple[int, ...], heads: int, n: int, m: int) -> None:
        """Raise ValueError unless the terms fit a call of these sizes. Reads shapes only."""
        if torch.compiler.is_compiling():
            own = fixed_by(self._alike) if self._alike else _fixed(self.bias)
            return check_sizes_of_call(own, batch, heads, n, m)
        call = (batch, heads, n, m)
        return self._keep(call, lambda: check_sizes_of_call(_fixed(self.bias), *call))

    def _keep(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        made: T = self._kept[key]
        return made


#: heads, and of every term its kind, batch dimensions and sizes that it fixes
Fixed = tuple[int, tuple[tuple[str, tuple[int, ...], tuple[tuple[str, int, str], ...]], ...]]


def _fixed(bias: ScoreBias) -> Fixed:
    """What the terms of a bias say of the calls that they fit; reads shapes only."""
    terms = ((t.kind, t.batch_shape(), tuple(t.fixed_sizes())) for t in bias.terms)
    return bias.num_heads, tuple(terms)


def check_sizes_of_call(own: Fixed, batch: tuple[int, ...], heads: int, n: int, m: int) -> None:
    """Raise ValueError unless terms that say `own` fit a call; see `PreparedBias.check_fits`."""
    num_heads, terms = own
    if num_heads != heads:
        raise ValueError(f"the bias is for {num_heads} heads, q has {heads}")
    for kind, term_batch, sizes in terms:
        if not broadcasts(term_batch, batch):
            raise ValueError(
                f"{kind}: batch dimensions {term_batch} do not broadcast to those of q, {batch}"
            )
        check_sizes(kind, sizes, n, m)


# -- forms that a trace asks for -------------------------------------------------------------------
#
# Packing is no part of a graph, which would repeat it in every call. The trace has it done on the
# real tensors, and then finds the forms as if a call in eager mode had left them. A graph may serve
# more than one bias: layers that are compiled one by one share theirs if each finds what the first
# one found. So a trace has the forms made for all biases that look alike to it, and it names them
# by what they look like. To name the object would be a guard on that object.


class _Alike:
    """Biases that look alike to a trace."""

    def __init__(self) -> None:
        self.members: weakref.WeakSet[PreparedBias] = weakref.WeakSet()


#: forgotten with the last member, each of which holds it
_GROUPS: weakref.WeakValueDictionary[str, _Alike] = weakref.WeakValueDictionary()


def _join(bias: PreparedBias) -> tuple[str, _Alike]:
    """Make `bias` a member of its group; returns the name of that, and the group."""
    name = intern(repr((bias.bias.spec(), str(bias.bias.device))))  # compared in every call
    group = _GROUPS.setdefault(name, _Alike())
    group.members.add(bias)
    return name, group


def settled(number: N) -> N:
    """The number itself where a trace leaves it open, as it does for sizes that change."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(number)  # type: ignore[return-value]


def problem_of(alike: str, half: bool) -> str | None:
    """What `unsupported` says of all biases of a group; looking at their terms would be guards."""
    return unsupported(next(iter(_GROUPS[alike].members)).bias, half=half)


def fixed_by(alike: str) -> Fixed:
    """What all biases of a group say of the calls that they fit: their shapes are in its name."""
    return _fixed(next(iter(_GROUPS[alike].members)).bias)


def make_outside_of_the_graph(alike: str, *form: Any) -> None:
    """Make a form for all biases of a group, with tensors that the trace does not know."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        for bias in tuple(_GROUPS[alike].members):
            bias.make_forms([form])


# torch.compile runs it while it traces, and takes the answer for a constant; see `device_problem`
make_outside_of_the_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
problem_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
fixed_by._dynamo_marked_constant = True  # type: ignore[attr-defined]
