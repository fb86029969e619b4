"""Launches the backward kernels for one group of heads, and sums what they write.

Gradients of tensors that the batch shares are summed in two steps, both in a fixed order: inside
a program over the entries of its split, then here over splits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .known_layouts import layout_number
from .launch_plan import MAX_PLANS
from .packing import GroupSpec
from .room import lacks_room
from .strides import (
    MAX_BATCH_DIMS,
    TAILS,
    VECTOR_BYTES,
    VECTORS,
    batch_strides,
    collapse_batch,
    own_strides,
    padded,
    vector_rows,
)
from .tuning import LaunchSettings, backward_settings

#: Programs of one launch that keep a card busy; loops over the batch are cut to reach it.
ENOUGH_PROGRAMS = 1024

#: Tensors of low-rank terms, which products take in.
FACTORS = frozenset({"phi_q", "phi_k"})
#: Tensors of axial terms.
AXIAL = frozenset({"rel_h", "rel_w"})
#: Terms that are added to scores element by element, by a tensor that each has.
ADDED = frozenset({"key_bias", "slopes", "table", "ids", "dense", "diagonal", "lookup", "rel_h"})
#: Tensors that are read and written in whole rows.
ROWS = ("q", "k", "v", "do", "raw_q", "raw_k", "dq", "dk", "dv")


#: settings that the shape does not decide, see `forced`
_FORCED: dict[str, LaunchSettings] = {}
#: settings of launches that the card has no room for with those of their shape
_SMALLER: dict[Hashable, LaunchSettings] = {}

Gradients = Callable[["GroupCall", Collection[str]], dict[str, Tensor]]


@contextmanager
def forced(kernel: str, settings: LaunchSettings) -> Iterator[None]:
    """Launch a backward kernel with these settings, whatever the shape, while the block runs.

    Args:
        kernel: "queries", "keys", "pairs" or "all", see `tuning.backward_settings`.
        settings: for it.
    """
    before = _FORCED.get(kernel)
    _FORCED[kernel] = settings
    try:
        yield
    finally:
        del _FORCED[kernel]
        if before is not None:
            _FORCED[kernel] = before


class TooManyBatchDimensions(Exception):
    """The kernels cannot tell the batch dimensions of this call apart."""


@dataclass(frozen=True)
class GroupCall:
    """The backward pass of one group of heads.

    Attributes:
        spec: the group, see `training_packing.rounded`.
        tensors: q, k (normalised with cosine attention), v, do, lse and delta, the tensors of the
            group as the kernels read them, and where present raw_q and raw_k, key_mask, starts,
            scale (H,), and dq, dk, dv (by query head), which are written.
        scale, query_start, causal, cosine: see `flashbias_attention`.
        atomic: add gradients of queries with atomics, where that saves a walk.
    """

    spec: GroupSpec
    tensors: Mapping[str, Tensor]
    scale: float
    query_start: int
    causal: bool
    cosine: bool
    atomic: bool = False

    @cached_property
    def layout(self) -> int:
        """How its tensors lie in memory, see `layout_number`."""
        return layout_number(self.tensors)

    @cached_property
    def aligned(self) -> bool:
        """Whether rows that are read and written whole all start at multiples of a vector."""
        return all(aligned(self.tensors[name]) for name in ROWS if name in self.tensors)

    @property
    def batch(self) -> tuple[int, ...]:
        """Batch dimensions of the call."""
        return tuple(self.tensors["q"].shape[:-3])

    @property
    def heads(self) -> int:
        """Heads of the group."""
        return self.tensors["q"].shape[-3] if self.spec.heads is None else len(self.spec.heads)

    def sizes(self) -> tuple[int, int, int, int]:
        """N, M, D and Dv."""
        q, v = self.tensors["q"], self.tensors["v"]
        return q.shape[-2], v.shape[-2], q.shape[-1], v.shape[-1]

    def half(self) -> bool:
        """Whether q, k and v came in half precision."""
        return self.tensors["v"].dtype != torch.float32

    def settings(self, kernel: str, wanted: Collection[str]) -> LaunchSettings:
        """How to launch "queries", "keys", "pairs" or "all" for the gradients that are wanted."""
        if kernel in _FORCED:
            return _FORCED[kernel]
        if _SMALLER and (found := _SMALLER.get(self._launch(kernel, wanted))):
            return found
        n, m, d, dv = self.sizes()
        rows = n if kernel == "queries" else m
        axial = [self.tensors[name].shape[-1] for name in AXIAL.intersection(wanted)]
        return backward_settings(
            kernel, rows=rows, d=padded(d), dv=padded(dv), columns=self.spec.columns,
            half=self.half(), added=ADDED.intersection(self.tensors),
            trained=not FACTORS.isdisjoint(wanted), axial=max(axial, default=0),
        )  # fmt: skip

    def _launch(self, kernel: str, wanted: Collection[str]) -> Hashable:
        return kernel, frozenset(wanted), self.spec, self.causal, self.cosine, self.layout


def fitting(kernel: str) -> Callable[[Gradients], Gradients]:
    """Let a function that launches a kernel try smaller settings where the card has no room.

    Args:
        kernel: "queries", "keys", "pairs" or "all". The function must ask the call for settings of
            this kernel and of the gradients that it is given.
    """

    def decorate(gradients: Gradients) -> Gradients:
        @functools.wraps(gradients)
        def launch(call: GroupCall, wanted: Collection[str]) -> dict[str, Tensor]:
            while True:
                try:
                    return gradients(call, wanted)
                except Exception as problem:
                    if kernel in _FORCED or not lacks_room(problem):
                        raise
                    smaller = call.settings(kernel, wanted).smaller()
                    if smaller is None:
                        raise
                if len(_SMALLER) >= MAX_PLANS:
                    _SMALLER.clear()
                _SMALLER[call._launch(kernel, wanted)] = smaller

        return launch

    return decorate


@dataclass(frozen=True)
class Shares:
    """How the batch is shared out among the programs of one launch; see `triton_tiles.Entries`.

    Attributes:
        walks: tensors with their strides, by name; vectors as they are.
        entries: what the kernel is told of the batch.
        lead: batch dimensions of the buffers, 1 where the batch is summed.
        slots: how many sums each program of a head has, splits times kept entries.
        splits: sums of the same kind that the host adds.
    """

    walks: Mapping[str, Any]
    entries: Any
    lead: tuple[int, ...]
    slots: int
    splits: int

    def bundle(self, kind: Any) -> Any:
        """A `Call` or `Terms` for the kernel."""
        return kind(*map(self.walks.get, kind._fields))

    def buffer(self, *shape: int, like: Tensor) -> Tensor:
        """Uninitialised fp32, (slots, *shape)."""
        return torch.empty((self.slots, *shape), dtype=torch.float32, device=like.device)

    def total(self, buffer: Tensor, shape: Sequence[int]) -> Tensor:
        """A buffer (slots, G, ...) summed to a tensor of `shape` that broadcasts to it.

        Sums over splits are those over one more dimension in front: one launch for all.
        """
        return sum_to(buffer.unflatten(0, (self.splits, *self.lead)), shape)


def sum_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` summed over what a tensor of `shape` broadcasts over."""
    if x.numel() == math.prod(shape):  # torch would launch a sum over single numbers, too
        return x.reshape(tuple(shape))
    extra = max(len(shape) - x.dim(), 0)  # leading ones
    return x.sum_to_size(tuple(shape[extra:])).reshape(tuple(shape))


@dataclass(frozen=True)
class _Shared:
    """What `share` finds, without the tensors; see `Shares`."""

    strides: Mapping[str, tuple[int, ...]]
    entries: Any
    lead: tuple[int, ...]
    slots: int
    splits: int


_SHARED: dict[Hashable, _Shared] = {}


def share(call: GroupCall, programs: int, outputs: Collection[str], everything: bool) -> Shares:
    """Decide which batch dimensions programs keep apart and which they sum over.

    Args:
        call: the group.
        programs: how many programs there are for one batch entry.
        outputs: the tensors whose gradients are written, or which they depend on.
        everything: keep all dimensions apart.

    Raises:
        TooManyBatchDimensions: more than `MAX_BATCH_DIMS` are left after merging.
    """
    from .triton_tiles import Walk

    key = (call.layout, programs, tuple(outputs), everything, ENOUGH_PROGRAMS)
    found = _SHARED.get(key)
    if found is None:
        if len(_SHARED) >= MAX_PLANS:
            _SHARED.clear()
        found = _SHARED[key] = _share(call, programs, outputs, everything)
    strides = found.strides
    walks = {n: Walk(t, strides[n]) if n in strides else t for n, t in call.tensors.items()}
    return Shares(walks, found.entries, found.lead, found.slots, found.splits)


def _share(call: GroupCall, programs: int, outputs: Collection[str], everything: bool) -> _Shared:
    from .triton_tiles import Entries

    batch = call.batch
    own = {n: t for n, t in call.tensors.items() if n not in VECTORS}
    strides = {n: batch_strides(n, t, batch) for n, t in own.items()}
    differ = [any(_has(own[n], n, batch, d) for n in outputs) for d in range(len(batch))]
    kept = [everything or each for each in differ]
    lead = tuple(size if keep else 1 for size, keep in zip(batch, kept, strict=True))
    steps = torch.empty(lead, device="meta").stride()
    marker = [step if keep else 0 for step, keep in zip(steps, kept, strict=True)]
    sizes, walks = collapse_batch(batch, [*strides.values(), marker])
    if len(sizes) > MAX_BATCH_DIMS:
        raise TooManyBatchDimensions
    missing = MAX_BATCH_DIMS - len(sizes)
    sizes = [1] * missing + sizes
    is_kept = [True] * missing + [step > 0 for step in walks[-1]]
    of_kept = [size if keep else 1 for size, keep in zip(sizes, is_kept, strict=True)]
    looped = [1 if keep else size for size, keep in zip(sizes, is_kept, strict=True)]
    entries, count = math.prod(looped), math.prod(of_kept)
    splits = min(entries, -(-ENOUGH_PROGRAMS // max(programs * count, 1)))
    per_split = -(-entries // max(splits, 1))
    splits = -(-entries // max(per_split, 1))
    return _Shared(
        strides={
            name: (*[0] * missing, *walk, *own_strides(name, own[name]))
            for name, walk in zip(own, walks, strict=False)
        },
        entries=Entries(count, of_kept[1], of_kept[2], entries, looped[1], looped[2], per_split),
        lead=lead,
        slots=splits * count,
        splits=splits,
    )


def _has(tensor: Tensor, name: str, batch: Sequence[int], d: int) -> bool:
    """Whether a tensor differs along batch dimension `d`."""
    axis = tensor.dim() - TAILS[name] - len(batch) + d
    return axis >= 0 and tensor.shape[axis] > 1


def kernel_arguments(call: GroupCall, shares: Shares, out: Any) -> tuple[Any, ...]:
    """The arguments that all backward kernels begin with."""
    from .triton_tiles import Call, Terms

    n, m, _, _ = call.sizes()
    return (
        shares.bundle(Call),
        shares.bundle(Terms),
        out,
        shares.entries,
        call.scale,
        call.query_start,
        call.spec.region_value,
        call.heads,
        call.tensors["q"].shape[-3] // call.tensors["k"].shape[-3],
        n,
        m,
    )


def kernel_constants(call: GroupCall, settings: LaunchSettings) -> dict[str, Any]:
    """The compile-time arguments that all backward kernels have."""
    _, m, d, dv = call.sizes()
    return {
        "D": d,
        "DV": dv,
        "BLOCK_D": padded(d),
        "BLOCK_DV": padded(dv),
        "COLUMNS": call.spec.columns,
        "ALIGNED": call.aligned,
        "CAUSAL": call.causal,
        "SYMMETRIC": call.spec.symmetric,
        "NATURAL": not call.half(),
        "ADDED": not ADDED.isdisjoint(call.tensors),
        "WHOLE": m % settings.block_n == 0,
        "BM": settings.block_m,
        "BN": settings.block_n,
    }


def walk_constants(call: GroupCall, settings: LaunchSettings) -> dict[str, Any]:
    """The compile-time arguments of `triton_keys.walk_keys`."""
    n, *_ = call.sizes()
    whole = {"WHOLE_ROWS": n % settings.block_m == 0, "COSINE": call.cosine}
    return kernel_constants(call, settings) | whole


def numbers_of(call: GroupCall, shares: Shares, out: Any, *more: int) -> tuple[Any, ...]:
    """What of the arguments of a kernel the layout of the call does not imply; see `run_kernel`.

    Args:
        call, shares, out: as for `kernel_arguments`.
        *more: other integers among the arguments.
    """
    there = tuple([x is not None for x in out or ()])
    return (call.query_start, *more, tuple(shares.entries), there)


def aligned(x: Tensor) -> bool:
    """Whether every row starts at a multiple of a vector."""
    return x.data_ptr() % VECTOR_BYTES == 0 and vector_rows(x)
