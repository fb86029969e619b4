"""Launches of the Hopper kernel."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..direct_launch import DirectLaunch, direct
from ..launch_plan import Launchable, on_device
from ..parts import multiprocessors_of
from ..strides import VECTOR_BYTES
from .rules import BLOCK_M, MARKS, ROWS, give_up, works

LOG2E = math.log2(math.e)
#: keys of a tile, tiles of keys under way, and warps of a warpgroup
BLOCK_N, STAGES, WARPS = 128, 2, 4
#: registers of a thread of the second math warpgroup, and of the warp that copies
MATH_REGISTERS, COPY_REGISTERS = 240, 24


class HopperPlan:
    """Everything about a launch that does not change between calls.

    Args:
        tensors: of the call by name, see `rules.serves`.
        columns: padded number of columns of factors.
        instead: serves calls whose tensors the card cannot copy, or a compiler that fails.
    """

    def __init__(self, tensors: Mapping[str, Tensor], columns: int, instead: Launchable) -> None:
        self._names, self._columns, self._instead = tuple(tensors), columns, instead
        q = tensors["q"]
        self._heads, self._n, self._d = q.shape[-3:]
        entries = self._heads * (q.shape[0] if q.dim() == 4 else 1)
        self._works = -(-self._n // BLOCK_M) * entries
        self._programs = multiprocessors_of(q.device)
        #: levels of the first tile have the range of bf16 alone
        self._quick = q.dtype == torch.bfloat16 and self._works <= MARKS * self._programs
        self._tiles = {
            name: Tiles.like(x, ROWS if name in ("q", "phi_q", "o") else BLOCK_N)
            for name, x in tensors.items()
        }
        self._launches: dict[bool, DirectLaunch | None] = {}

    def run(
        self, device: torch.device, tensors: Iterable[Tensor], numbers: Sequence[float] = ()
    ) -> None:
        """Launch on `device`, on which the tensors are; `numbers` begin with the scale."""
        given = tuple(tensors)
        if not works() or any(x.data_ptr() % VECTOR_BYTES for x in given):
            self._instead.run(device, given, numbers)
            return
        try:
            with on_device(device):
                self._run(device, dict(zip(self._names, given, strict=True)), numbers[0])
        except Exception as problem:
            if len(self._launches) > self._quick:  # all is compiled: no fault of a compiler
                raise
            self._instead.run(device, given, numbers)
            if give_up(str(problem)):
                words = "attention runs on the usual kernel, since that for Hopper fails"
                warnings.warn(f"{words} ({type(problem).__name__}: {problem})", stacklevel=2)

    def _run(self, device: torch.device, tensors: Mapping[str, Tensor], scale: float) -> None:
        marks = None
        if self._quick:
            marks = torch.zeros(self._works, dtype=torch.int32, device=device)
        values = self.arguments(tensors, scale, marks)
        self._launch(self._works, values, again=False)
        if self._quick:
            self._launch(min(self._works, self._programs), values, again=True)

    def arguments(
        self, tensors: Mapping[str, Tensor], scale: float, marks: Tensor | None
    ) -> dict[str, Any]:
        """Of the kernel, by name, but for the constants of a pass."""
        described = {f"{name}_desc": self._tiles[name].of(tensors[name]) for name in self._tiles}
        values: dict[str, Any] = {
            "q_desc": None, "phi_q_desc": None, "k_desc": None, "v_desc": None, "phi_k_desc": None,
            "o_desc": None, "marks_ptr": marks, "to_exp2": scale * LOG2E, "N": self._n,
            "H": self._heads, "works": self._works,
            "many_qb": 0, "many_qh": 0, "many_kb": 0, "many_kh": 0,
        }  # fmt: skip
        if self._columns:
            many = (*self._tiles["phi_q"].shape[:2], *self._tiles["phi_k"].shape[:2])
            names = ("many_qb", "many_qh", "many_kb", "many_kh")
            values |= {name: int(size > 1) for name, size in zip(names, many, strict=True)}
        constants = {"BN": BLOCK_N, "D": self._d, "R": self._columns, "STAGES": STAGES}
        return {**values, **described, **constants}

    def constants(self, again: bool) -> dict[str, Any]:
        """Those of a pass, in the kernel's order."""
        quick = self._quick and not again
        return {
            "QUICK": quick, "AGAIN": again, "MATH_REGS": MATH_REGISTERS,
            "COPY_REGS": COPY_REGISTERS, "num_warps": WARPS,
        }  # fmt: skip

    def _launch(self, programs: int, values: Mapping[str, Any], again: bool) -> None:
        every = {**values, **self.constants(again)}
        known = self._launches.get(again)
        if known is not None:
            known(programs, every.values())
            return
        self._launches[again] = direct(_kernel()[(programs,)](**every))


@cache
def _kernel() -> Any:
    from .kernel import attention_kernel

    return attention_kernel


@dataclass(frozen=True)
class Tiles:
    """Tiles (1, 1, rows, columns) of a tensor (B, H, N, columns), zeros past the end of N.

    Attributes:
        shape, strides: of the tensor, without entries that are the same for all.
        block, layout: of a tile, and how it lies in shared memory.
    """

    shape: list[int]
    strides: list[int]
    block: list[int]
    layout: Any

    @classmethod
    def like(cls, x: Tensor, rows: int) -> Tiles:
        """For tensors like this one, (H, N, columns) or with a batch before."""
        from triton.experimental.gluon import language as gl

        x = x if x.dim() == 4 else x[None]
        for dim in (0, 1):
            if x.stride(dim) == 0:
                x = x.narrow(dim, 0, 1)
        block = [1, 1, rows, x.shape[-1]]
        kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
        layout = gl.NVMMASharedLayout.get_default_for(block, kind)
        return cls(list(x.shape), list(x.stride()), block, layout)

    def of(self, tensor: Tensor) -> Any:
        """What the kernel takes."""
        return _descriptor()(tensor, self.shape, self.strides, self.block, self.layout)


@cache
def _descriptor() -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor
