"""Tensors as they are described to the card, which copies tiles of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..direct_launch import DirectLaunch, is_watched
from .rules import rows_of

#: descriptions that a launch keeps; the tensors of a model have few places in memory
MOST_KNOWN = 256


class Tiles:
    """Tiles of tensors of one layout, zeros past their end.

    Args:
        shape, strides: of the tensors, without entries that are the same for all.
        block, layout: of a tile, and how it lies in shared memory.
    """

    def __init__(self, shape: list[int], strides: list[int], block: list[int], layout: Any) -> None:
        self.shape, self.strides, self.block, self.layout = shape, strides, block, layout
        #: what the descriptors have in common, once there was one
        self._common: dict[str, Any] | None = None

    def of(self, tensor: Tensor) -> Any:
        """What the kernel takes. The tensor begins where a card can copy from."""
        if self._common is None:
            made = _descriptor()(tensor, self.shape, self.strides, self.block, self.layout)
            self._common = {name: value for name, value in vars(made).items() if name != "base"}
            return made
        # checks that hold for one of this layout hold for all, and take longer than the launch
        made = object.__new__(_descriptor())
        made.__dict__.update(self._common, base=tensor)
        return made


class DescribedLaunch(DirectLaunch):
    """Launches a compiled kernel, and describes a place in memory to the card once.

    Triton encodes what it says of a tensor anew in every launch, which for five of them takes as
    long as all else. It depends on where a tensor is, and on what is the same for all launches.

    Args:
        compiled: see `DirectLaunch`. Where Triton's launcher is made in another way than in the
            versions that `rules` names, it does all as it does it.
    """

    def __init__(self, compiled: Any) -> None:
        super().__init__(compiled)
        self._encode, self._launcher, self._meta = _parts_of(self._run)
        self._known: dict[tuple[int, int], list[Any]] = {}

    def __call__(self, programs: int, arguments: Iterable[Any]) -> None:
        """Launch so many programs with these arguments, the constants among them."""
        if self._encode is None or is_watched():
            super().__call__(programs, arguments)
            return
        kind, given, place = _descriptor(), [], 0
        for value in arguments:
            if type(value) is kind:
                given += self._described(place, value)
                place += 1
            else:
                given.append(value)
        driver, run = self._driver, self._run
        stream = driver.get_current_stream(driver.get_current_device())
        function, *constant = self._constant
        launch = (function, run.launch_cooperative_grid, run.launch_pdl, None, None, *constant)
        self._launcher(programs, 1, 1, stream, *launch, *given)

    def _described(self, place: int, value: Any) -> list[Any]:
        key = (place, value.base.data_ptr())
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            assert self._encode is not None
            known = self._known[key] = self._encode(value, self._meta[place])
        return known


def _parts_of(run: Any) -> tuple[Callable[..., list[Any]] | None, Any, list[Any]]:
    """How Triton encodes a description, what launches with it, and what it knows of each."""
    wrapped: Any = getattr(run, "launch", None)
    names = getattr(getattr(wrapped, "__code__", None), "co_freevars", ())
    if set(names) != {"launcher", "tensordesc_indices", "tensordesc_meta"}:
        return None, None, []
    if run.global_scratch_size or run.profile_scratch_size:
        return None, None, []
    found = {n: c.cell_contents for n, c in zip(names, wrapped.__closure__, strict=True)}
    encode = wrapped.__globals__.get("make_tensordesc_arg")
    return encode, found["launcher"], found["tensordesc_meta"]


def described(compiled: Any) -> DescribedLaunch | None:
    """How to launch it again; None for what is no compiled kernel, as a recorder gives."""
    return None if compiled is None else DescribedLaunch(compiled)


def row_tiles(x: Tensor, rows: int) -> Tiles:
    """Tiles (1, 1, rows, columns) of tensors like this one, (H, N, columns) or with a batch."""
    from triton.experimental.gluon import language as gl

    x = x if x.dim() == 4 else x[None]
    for dim in (0, 1):
        if x.stride(dim) == 0:
            x = x.narrow(dim, 0, 1)
    block = [1, 1, rows, x.shape[-1]]
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return Tiles(list(x.shape), list(x.stride()), block, layout)


def key_tiles(x: Tensor, keys: int) -> tuple[Tiles, int, int]:
    """Tiles (1, keys) of the rows of a bias per key, see `rules.rows_of`.

    Returns:
        The tiles, rows from a batch entry to the next, and from a head to the next.
    """
    from triton.experimental.gluon import language as gl

    found = rows_of(x)
    assert found is not None
    row, per_entry, per_head = found
    b, h = (1, x.shape[0]) if x.dim() == 2 else x.shape[:2]
    rows = 1 + (b - 1) * per_entry + (h - 1) * per_head
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return Tiles([rows, x.shape[-1]], [row, 1], [1, keys], layout), per_entry, per_head


@cache
def _descriptor() -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor
