"""Compiles the kernels for a card that need not be there.

Everything up to the launch is the real thing: packing, the plan, and how Triton specialises its
arguments. Only the driver is replaced, by one that names the card, and the launch is left out.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from flashbias_convert import ScoreBias
from flashbias_convert.attention import (
    PreparedBias,
    backward_launch,
    descriptors,
    factor_launch,
    launch,
    normalize,
    projection,
    triton_atomic,
    triton_backward,
    triton_columns,
    triton_combine,
    triton_forward,
    triton_keys,
    triton_normalize,
    triton_pairs,
    triton_projection,
    triton_shared,
)
from flashbias_convert.attention.arguments import check_arguments
from flashbias_convert.attention.factor_columns import column_gradients, columns_by_name
from flashbias_convert.attention.factors import column_tops
from flashbias_convert.attention.hopper import plan as hopper_plan
from flashbias_convert.attention.hopper import rules as hopper_rules
from flashbias_convert.attention.operator import training_attention, triton_attention

from .sass import unwritten_registers

#: Shared memory that one program may use on a card of compute capability 9.0: H100, H200.
HOPPER_SHARED_BYTES = 227 * 1024

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


@dataclass(frozen=True)
class Card:
    """A card to compile for.

    Attributes:
        capability: compute capability, times ten.
        shared_bytes: of shared memory that one program may use there.
    """

    capability: int
    shared_bytes: int


HOPPER = Card(90, HOPPER_SHARED_BYTES)


@dataclass(frozen=True)
class AbsentCard:
    """The part of a Triton driver that compiling asks for."""

    card: Card

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card.capability, 32)

    def get_current_device(self) -> str:
        # kernels are cached by device, and a real card has a number
        return f"absent {self.card.capability}"

    def get_current_stream(self, device: str) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        name: of the kernel.
        constants: its compile-time arguments that are numbers or booleans, by name.
        num_warps: warps per program.
        shared: bytes of shared memory.
        ptx: the assembly text.
        cubin: the binary.
    """

    name: str
    constants: dict[str, int]
    num_warps: int
    shared: int
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    def spills_in_loops(self, folder: Path) -> int:
        """Accesses of local memory in innermost loops. Needs nvdisasm; writes to `folder`."""
        return sum(_count(body, " LDL", " STL") for body in self._loops(folder))

    def waits_in_loops(self, folder: Path) -> list[tuple[int, int]]:
        """Waits for wide tensor-core instructions, and these, in innermost loops."""
        return [
            (_count(body, "WARPGROUP.DEPBAR"), _count(body, "HGMMA"))
            for body in self._loops(folder)
        ]

    def counted(self, folder: Path, *words: str) -> int:
        """Instructions that have one of some words in them. Needs nvdisasm; writes to `folder`."""
        return _count(self._listing(folder), *words)

    def unwritten_registers(self, folder: Path) -> list[str]:
        """Instructions that read what the assembler has forgotten to write; see `sass`."""
        return unwritten_registers(self._listing(folder))

    def _loops(self, folder: Path) -> list[list[str]]:
        return _innermost_loops(self._listing(folder))

    def _listing(self, folder: Path) -> list[str]:
        file = folder / "kernel.cubin"
        file.write_bytes(self.cubin)
        command = [str(NVDISASM), "-c", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return text.splitlines()


def _count(lines: list[str], *words: str) -> int:
    return sum(any(word in line for word in words) for line in lines)


def _innermost_loops(lines: list[str]) -> list[list[str]]:
    """Stretches of disassembly between a label and a branch back to it, without others inside."""
    labels, loops = {}, []
    for i, line in enumerate(lines):
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            labels[found[1]] = i
        found = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if found and found[1] in labels:
            loops.append((labels[found[1]], i))
    assert loops, "no loop in the disassembly"
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [lines[first : last + 1] for first, last in inner]


def compile_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: ScoreBias | None = None,
    *,
    card: Card = HOPPER,
    hopper: bool = False,
    **options: Any,
) -> list[Compiled]:
    """Compile what `flashbias_attention(q, k, v, bias, **options)` would launch, in order.

    Args:
        q, k, v: tensors on the CPU; their values do not matter.
        card: the one that is not there.
        hopper: with the kernel for Hopper where it serves a call.
        bias, options: as for `flashbias_attention`.
    """
    call: dict[str, Any] = {"scale": None, "causal": False, "query_start": None, "key_mask": None}
    args = check_arguments(q, k, v, **{**call, "cosine": False, **options})
    with _recording(card=card, hopper=hopper) as compiled:
        triton_attention(q, k, v, None if bias is None else PreparedBias(bias), args)
    return compiled


def compile_training(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: ScoreBias | None = None,
    *,
    forward: bool = True,
    deterministic: bool = True,
    card: Card = HOPPER,
    **options: Any,
) -> list[Compiled]:
    """Compile what a call and its backward pass would launch, in order.

    Args:
        q, k, v: tensors on the CPU that ask for gradients; their values do not matter.
        forward: compile the forward kernel, too.
        deterministic: see `flashbias_attention`.
        card: the one that is not there.
        bias, options: as for `flashbias_attention`.
    """
    call: dict[str, Any] = {"scale": None, "causal": False, "query_start": None, "key_mask": None}
    args = check_arguments(q, k, v, **{**call, "cosine": False, **options})
    with _recording(forward, card) as compiled:
        prepared = None if bias is None else PreparedBias(bias)
        out = training_attention(q, k, v, prepared, args, deterministic)
        out.backward(torch.zeros_like(out))
    return compiled


def compile_normalize_rows(x: Tensor) -> Compiled:
    """Compile what `normalize_rows(x)` would launch."""
    with _recording() as compiled:
        normalize.normalize_rows(x)
    (only,) = compiled
    return only


def compile_projection(
    z: Tensor, weight: Tensor, norms: bool, dtype: torch.dtype | None = None
) -> Compiled:
    """Compile what `project_pairs` would launch, with all that a norm and a layer can have."""
    channels = torch.zeros(z.shape[-1], dtype=weight.dtype)
    with _recording() as compiled:
        projection.project_pairs(
            z, channels, channels, weight, weight[:, 0], norms=norms, dtype=dtype
        )
    (only,) = compiled
    return only


def compile_factors(
    phi_q: Tensor,
    phi_k: Tensor,
    split: int,
    scale: float | Tensor | None,
    again: Mapping[str, torch.dtype] | None = None,
    wanted: Collection[str] = ("phi_q", "phi_k"),
) -> list[Compiled]:
    """Compile what `columns_by_name` would launch for fp16 columns, and `column_gradients` back.

    Args:
        phi_q, phi_k, split, scale, again: see there.
        wanted: whose gradients are wanted.
    """
    tops = column_tops(phi_q, phi_k)
    with _recording() as compiled, mock.patch.object(factor_launch, "_is_readable", lambda _: True):
        made = columns_by_name(phi_q, phi_k, tops, split, torch.float16, scale, again)
        found = {name: made[name].float() for name in wanted}
        column_gradients(phi_q, phi_k, split, found, tops)
    return compiled


@contextmanager
def _recording(
    with_forward: bool = True, card: Card = HOPPER, hopper: bool = False
) -> Iterator[list[Compiled]]:
    compiled: list[Compiled] = []
    attention = triton_forward.attention_kernel
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", AbsentCard(card)))
        copies = mock.patch.object(descriptors, "_copies_tiles", lambda _: card.capability >= 90)
        stack.enter_context(copies)
        stack.enter_context(mock.patch.object(backward_launch, "_SMALLER", {}))
        for module in (launch, normalize, projection, factor_launch):
            stack.enter_context(mock.patch.object(module, "_PLANS", {}))
        forward = _Recorder(attention, compiled if with_forward else None, card)
        stack.enter_context(mock.patch.object(launch, "_kernel", lambda: forward))
        shared = _Recorder(triton_shared.shared_dense_kernel, compiled, card)
        stack.enter_context(mock.patch.object(launch, "_shared_kernel", lambda: shared))
        stack.enter_context(mock.patch.object(hopper_rules, "is_there", lambda _: hopper))
        if hopper:
            own = _Recorder(hopper_plan._kernel(), compiled, card)
            stack.enter_context(mock.patch.object(hopper_plan, "_kernel", lambda: own))
            other = _Recorder(hopper_plan._lengths_kernel(), compiled, card)
            stack.enter_context(mock.patch.object(hopper_plan, "_lengths_kernel", lambda: other))
        for module, name in KERNELS:
            recorder = _Recorder(getattr(module, name), compiled, card)
            stack.enter_context(mock.patch.object(module, name, recorder))
        yield compiled


#: Kernels besides the forward one, which a plan keeps.
KERNELS = (
    (triton_normalize, "normalize_rows_kernel"),
    (triton_projection, "project_pairs_kernel"),
    (triton_combine, "combine_parts_kernel"),
    (triton_columns, "factor_columns_kernel"),
    (triton_columns, "factor_gradients_kernel"),
    (triton_backward, "delta_kernel"),
    (triton_backward, "query_gradients_kernel"),
    (triton_keys, "key_gradients_kernel"),
    (triton_atomic, "all_gradients_kernel"),
    (triton_atomic, "finish_queries_kernel"),
    (triton_pairs, "pair_gradients_kernel"),
    (triton_pairs, "sums_by_code_kernel"),
)


class _Recorder:
    """Stands in for a kernel: launching it compiles it and notes the result, if there is a list."""

    def __init__(self, kernel: Any, compiled: list[Compiled] | None, card: Card) -> None:
        self.kernel, self.compiled, self.card = kernel, compiled, card
        self.arg_names: list[str] = kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launched(*args: Any, **kwargs: Any) -> None:  # a plan keeps nothing to launch again
            if self.compiled is None:
                return
            made = self.kernel.warmup(*args, grid=grid, **kwargs)
            if made.metadata.shared > self.card.shared_bytes:  # what loading it there would say
                limit = self.card.shared_bytes
                raise OutOfResources(made.metadata.shared, limit, "shared memory")
            values = dict(zip(self.arg_names, args, strict=False)) | kwargs
            constants = {n: v for n, v in values.items() if n.isupper() and isinstance(v, int)}
            self.compiled.append(
                Compiled(
                    name=made.metadata.name,
                    constants=constants,
                    num_warps=made.metadata.num_warps,
                    shared=made.metadata.shared,
                    ptx=made.asm["ptx"],
                    cubin=made.asm["cubin"],
                )
            )

        return launched
