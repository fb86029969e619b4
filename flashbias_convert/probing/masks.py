"""Masks are told from biases: what hides keys, and what keeps the regions of a window apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..decompose import regions
from ..terms import Regions
from .calls import ROUNDINGS, AttentionCall
from .operations import MASKED_BELOW

#: A finite mask, such as Swin's -100, lies below this; no bias of two values does.
FINITE_MASK_BELOW = -50.0


@dataclass(frozen=True, eq=False)
class Separated:
    """What one call adds, without its masks.

    Attributes:
        bias: shape (b, H or 1, N, M) as in `AttentionCall`; zero where hidden. None if nothing
            but masks is added.
        hidden: bool, shape (b, H or 1, N, M); None if every query sees every key.
        regions: masks of two values, as terms.
        repeated: number of addends that had been added before: masks, biases.
        rounding: what the bias may be off by, because it was added to something first.
        zeros: whether zeros are added: a mask that hides nothing, or a bias never trained.
    """

    bias: Tensor | None
    hidden: Tensor | None
    regions: tuple[Regions, ...] = ()
    repeated: tuple[int, int] = (0, 0)
    rounding: float = 0.0
    zeros: bool = False


def separate(call: AttentionCall) -> Separated:
    """Split the addends of a call into a bias and masks."""
    hidden = call.hidden
    found: list[Regions] = []
    masks: list[Tensor] = []
    biases: list[Tensor] = []
    for addend in call.addends:
        far = addend <= MASKED_BELOW
        rest = addend.masked_fill(far, 0)
        if bool(far.any()):
            hidden = far if hidden is None else either(hidden, far)
        two = _two_valued(rest)
        if two is not None:
            found.append(two)
        if two is not None or (bool(far.any()) and not bool(rest.any())):
            masks.append(addend)
        elif bool(rest.any()):
            biases.append(rest)
    hidden = None if hidden is None or not bool(hidden.any()) else hidden
    repeated = (_repeated(masks, None), _repeated(biases, hidden))
    bias, steps, rounding = _total(biases, hidden)
    if steps is not None:
        found.append(steps)
    if hidden is not None:
        hidden = hidden.expand(*hidden.shape[:2], call.n, call.m)
    if bias is not None:
        bias = bias.expand(*bias.shape[:2], call.n, call.m)
        bias = bias if hidden is None else _cleared(bias, hidden)
    zeros = any(not bool(addend.any()) for addend in call.addends)
    return Separated(bias, hidden, tuple(found), repeated, rounding, zeros)


def _total(
    biases: list[Tensor], hidden: Tensor | None
) -> tuple[Tensor | None, Regions | None, float]:
    """The sum, a mask that was in it, and what that mask has rounded away."""
    if not biases:
        return None, None, 0.0
    bias = biases[0]
    for one in biases[1:]:
        bias = added(bias, one)
    bias, steps = _without_steps(bias, hidden)
    if steps is None:
        return bias, None, 0.0
    largest = float(bias.abs().max()) - steps.value
    return bias, steps, ROUNDINGS * torch.finfo(bias.dtype).eps * largest


def _repeated(addends: list[Tensor], hidden: Tensor | None) -> int:
    """How many of them are the same as an earlier one, where nothing is hidden."""
    count = 0
    for i, addend in enumerate(addends):
        count += any(_is_same(addend, earlier, hidden) for earlier in addends[:i])
    return count


def _is_same(a: Tensor, b: Tensor, hidden: Tensor | None) -> bool:
    a, b = together(a, b)
    if hidden is None:
        return a.shape == b.shape and torch.equal(a, b)
    wrong, hidden = together((a - b).abs(), hidden)
    allowed = ROUNDINGS * torch.finfo(a.dtype).eps * float(a.abs().max())
    return bool((wrong.masked_fill(hidden, 0) <= allowed).all())


def together(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The two with one batch size; the smaller batch is repeated."""
    size = max(a.shape[0], b.shape[0])

    def repeated(tensor: Tensor) -> Tensor:
        times = 1 if tensor.shape[0] == 1 else size // tensor.shape[0]
        return tensor if times == 1 else tensor.repeat(times, *(1,) * (tensor.dim() - 1))

    return repeated(a), repeated(b)


def one_period(batch: Tensor) -> Tensor:
    """The shortest part of a batch that it repeats."""
    size = len(batch)
    for period in (p for p in range(1, size) if size % p == 0):
        if bool((batch.unflatten(0, (-1, period)) == batch[:period]).all()):
            return batch[:period]
    return batch


def added(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two addends."""
    a, b = together(a, b)
    return a + b


def either(a: Tensor, b: Tensor) -> Tensor:
    """Where one of two masks hides."""
    a, b = together(a, b)
    return a | b


def _cleared(bias: Tensor, hidden: Tensor) -> Tensor:
    """Zero where hidden, if the same cells are hidden in the whole batch; else as it is."""
    return bias.masked_fill(hidden, 0) if hidden.shape[:2] == (1, 1) else bias


def _two_valued(addend: Tensor) -> Regions | None:
    """A mask that separates regions, shape (b, 1, N, M)."""
    if float(addend.min()) > FINITE_MASK_BELOW or not bool((addend == addend[:, :1]).all()):
        return None
    term = regions(one_period(addend[:, 0]))
    return term if term is not None and term.value <= FINITE_MASK_BELOW else None


def _without_steps(bias: Tensor, hidden: Tensor | None) -> tuple[Tensor, Regions | None]:
    """Undo a mask that the model has added to its bias: what differs between windows by one step.

    Every cell must be free in at least one window, as in the windows that a shift leaves whole.
    """
    if bias.shape[0] < 2 or hidden is not None:
        return bias, None
    steps = bias - bias.amax(0, keepdim=True)
    low = float(steps.min())
    if low > FINITE_MASK_BELOW:
        return bias, None
    value = float(round(low))
    allowed = ROUNDINGS * torch.finfo(bias.dtype).eps * (float(bias.abs().max()) - value)
    stepped = (steps - value).abs() <= allowed
    if not bool((stepped | (steps.abs() <= allowed)).all()):
        return bias, None
    same = bool((stepped == stepped[:, :1]).all())
    term = regions(one_period(stepped[:, 0]).to(bias.dtype) * value) if same else None
    return (bias, None) if term is None else (bias.amax(0, keepdim=True), term)
