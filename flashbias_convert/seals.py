"""What terms were made from: how it is remembered, and how a change of it is noticed."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

#: a parameter, a buffer, or a size
Sources = tuple[Tensor | Hashable, ...]
#: hashes of the numbers of one tensor: as they are, and in every rounding; zeros if not known
Row = tuple[int, ...]

#: what may happen to weights between saving and loading; the first keeps all that terms can show
ROUNDINGS: tuple[tuple[torch.dtype, ...], ...] = (
    (torch.float32,),
    (torch.bfloat16,),
    (torch.float16,),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
)
#: hashes in a `Row`
COLUMNS = 1 + len(ROUNDINGS)
#: of a tensor that is not known
NO_ROW: Row = (0,) * COLUMNS
#: sources of one site up to so many bytes are compared at each call on a CPU
_COMPARED_BYTES = 2**20
#: odd 64-bit constants that spread bits (those of splitmix64), as signed numbers
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


@dataclass(frozen=True)
class Seal:
    """What the terms were made from, as it was then.

    Attributes:
        state: identities, versions and sizes.
        values: `values_of` the sources.
        copies: addresses, and what was there, of tensors on a CPU.
        broken: known to be stale; holds until the terms are made or loaded again.
        unmatched: broken, because terms were loaded beside weights that they do not belong to.
        doubted: something was different once, or may be: the numbers decide.
    """

    state: tuple[Hashable, ...] = ()
    values: tuple[int, ...] = ()
    copies: tuple[tuple[int, bytes], ...] = ()
    broken: bool = False
    unmatched: bool = False
    doubted: bool = False

    @classmethod
    def of(cls, sources: Sources) -> Seal:
        """Of the sources as they are now; reads them."""
        return cls(state_of(sources), values_of(sources), _copies(sources))

    def is_untouched(self, state: tuple[Hashable, ...]) -> bool:
        """Whether nothing was touched, as far as can be told without reading from a device.

        Args:
            state: `state_of` the sources. It has the addresses, so what lies there can be read.
        """
        if self.doubted or state != self.state:
            return False
        if not self.copies:  # on a card not even a loop
            return True
        return all(ctypes.string_at(at, len(then)) == then for at, then in self.copies)

    def in_doubt(self) -> Self:
        """The same, to be believed only after the numbers were compared."""
        return self if self.broken or self.doubted else replace(self, doubted=True)

    def renewed(self, sources: Sources) -> Self:
        """The same numbers, elsewhere."""
        state, copies = state_of(sources), _copies(sources)
        return replace(self, state=state, copies=copies, doubted=False)


BROKEN = Seal(broken=True)
UNMATCHED = Seal(broken=True, unmatched=True)


# -- identities ----------------------------------------------------------------------------


def state_of(sources: Sources) -> tuple[Hashable, ...]:
    """Identities, versions and sizes; costs nothing."""
    return tuple(_identity(s) if isinstance(s, Tensor) else s for s in sources)


def same_sizes(sources: Sources, state: tuple[Hashable, ...]) -> bool:
    """Whether what is no tensor is still as in `state`."""
    if len(sources) != len(state):
        return False
    pairs = zip(sources, state, strict=True)
    return all(isinstance(source, Tensor) or source == then for source, then in pairs)


def kept_elsewhere(module: nn.Module, sources: Sources) -> bool:
    """Whether a wrapper puts the sources in their place for a moment, or keeps parts of them.

    That is FSDP, which marks the modules that it manages, a DTensor, and the hooks of accelerate
    while a weight is offloaded.
    """
    tensors = list(_tensors(sources))
    if getattr(module, "_is_fsdp_managed_module", False) or any(map(is_distributed, tensors)):
        return True
    hooked = any(hasattr(child, "_hf_hook") for child in module.modules())
    return hooked and any(tensor.is_meta for tensor in tensors)


def _tensors(sources: Sources) -> Iterator[Tensor]:
    return (source for source in sources if isinstance(source, Tensor))


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    # by name: torch.distributed may not be there
    return type(tensor).__module__.startswith("torch.distributed.")


def _identity(tensor: Tensor) -> Hashable:
    if is_distributed(tensor):
        return (id(tensor), _identity(tensor.to_local()))  # type: ignore[attr-defined]
    # the address tells of `parameter.data = ...`, which the version does not count
    address = 0 if _is_wrapped(tensor) else tensor.data_ptr()
    return (id(tensor), address, -1 if tensor.is_inference() else tensor._version)


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether it stands for another tensor inside a transform of `torch.func`."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _copies(sources: Sources) -> tuple[tuple[int, bytes], ...]:
    """Of writes through ``.data`` torch keeps no trace; on a CPU a look costs a microsecond."""
    found, left = [], _COMPARED_BYTES
    for tensor in _tensors(sources):
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
        plain = plain and not _is_wrapped(tensor)
        if not plain or tensor.layout != torch.strided or not tensor.is_contiguous():
            continue
        if 0 < tensor.nbytes <= left:
            left -= tensor.nbytes
            at = tensor.data_ptr()
            found.append((at, ctypes.string_at(at, tensor.nbytes)))
    return tuple(found)


# -- numbers -------------------------------------------------------------------------------


def values_of(sources: Sources) -> tuple[int, ...]:
    """A hash of the numbers of each tensor; 0 of one on the meta device. Reads the others.

    Sums of integers: the same on all devices and in any order of summation.
    """
    return tuple(_hash(_whole(tensor)) for tensor in _tensors(sources))


def rows_of(sources: Sources, values: Sequence[int], known: Sequence[Row] = ()) -> tuple[Row, ...]:
    """A row of each tensor.

    Args:
        sources: the tensors, among sizes.
        values: `values_of` them.
        known: earlier rows; they stay where a tensor is what they were made of, or a rounding of
            it.
    """
    if len(known) != len(values):
        known = [NO_ROW] * len(values)
    rows = []
    for tensor, exact, row in zip(_tensors(sources), values, known, strict=True):
        if not exact:
            rows.append(NO_ROW)
        elif exact in row:
            rows.append(row)
        else:
            whole = _whole(tensor)
            casts = (_rounded(whole, chain) for chain in ROUNDINGS)
            rows.append((exact, *(exact if cast is whole else _hash(cast) for cast in casts)))
    return tuple(rows)


def differ(then: Sequence[int], now: Sequence[int]) -> bool:
    """Whether `values_of` are others; those that are on the meta device now are not looked at."""
    return len(then) != len(now) or any(b and a != b for a, b in zip(then, now, strict=True))


def saved_rows(module: nn.Module, sources: Sources, rows: Sequence[Row]) -> list[Row]:
    """Rows as a state dict should have them: zeros for what none holds.

    Who loads it makes such a table himself, perhaps with other roundings; integers are the same.
    """
    kept = {id(parameter) for parameter in module.parameters()}
    for part in module.modules():
        names = part._buffers.keys() - part._non_persistent_buffers_set
        kept |= {id(part._buffers[name]) for name in names}
    return [
        row if id(t) in kept or isinstance(t, nn.Parameter) or not t.is_floating_point() else NO_ROW
        for t, row in zip(_tensors(sources), rows, strict=True)
    ]


def vouches(rows: Sequence[Row], sources: Sources) -> bool:
    """Whether sources are what rows were made of, or what a cast has made of it.

    No tolerance: weights that were rounded between saving and loading are exactly one of
    `ROUNDINGS`. True, too, where nothing can be told: for tensors on the meta device, rows of
    zeros, and rows of another number of sources, which are those of another release.
    """
    values = values_of(sources)
    if len(values) != len(rows):
        return True
    return all(not v or not any(row) or v in row for v, row in zip(values, rows, strict=True))


def _whole(tensor: Tensor) -> Tensor:
    if is_distributed(tensor):  # all processes come here: they load or train together
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return tensor.detach()


def _rounded(tensor: Tensor, chain: tuple[torch.dtype, ...]) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    for dtype in chain:
        tensor = tensor.to(dtype)
    return tensor


def _hash(tensor: Tensor) -> int:
    """Of the numbers, whatever their dtype; integers wrap around."""
    if tensor.is_meta or not tensor.numel():
        return 0
    if tensor.is_floating_point():
        tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
        tensor = _narrow(tensor) + 0.0  # -0.0 equals 0.0
        tensor = tensor.view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)
    bits = tensor.flatten().to(torch.int64) + 1  # of zeros, too, the hash is not 0
    weights = torch.arange(1, len(bits) + 1, device=bits.device) * _STEP
    weights = (weights ^ (weights >> 31)) * _FIRST
    weights = (weights ^ (weights >> 29)) * _SECOND | 1
    return int((bits * weights).sum())


def _narrow(tensor: Tensor) -> Tensor:
    """In fp32 if that holds the same numbers, so that a cast to fp64 changes no hash."""
    if tensor.dtype != torch.float64:
        return tensor
    narrow = tensor.float()
    return narrow if torch.equal(narrow.double(), tensor) else tensor
