"""Launches of the Hopper kernel."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..direct_launch import DirectLaunch
from ..launch_plan import Launchable, on_device
from ..parts import multiprocessors_of
from ..strides import VECTOR_BYTES
from .described import Tiles, described, key_tiles, row_tiles
from .forms import NO_BIAS, Form
from .rules import LOG2E, MARKS, ROWS, give_up, works

#: warps of a warpgroup
WARPS = 4
#: tensors that are described to the card as they are
TILED = frozenset({"q", "k", "v", "o", "phi_q", "phi_k"})
#: and those of which it gets the address
POINTERS = ("slopes", "table", "codes_q", "codes_k")
#: bytes of keys and values that the cache holds beside what goes through it
CACHED_BYTES = 24 * 2**20
#: numbers of int32 in whole vectors that a card writes at once, and rows of a program of lengths
WHOLE, LENGTHS_BLOCK = 64, 128


class HopperPlan:
    """Everything about a launch that does not change between calls.

    Args:
        tensors: of the call by name, see `rules.form_of`.
        form: how the kernel computes it.
        instead: serves calls that begin at another position, or whose tensors the card cannot copy,
            or a compiler that fails.
    """

    def __init__(self, tensors: Mapping[str, Tensor], form: Form, instead: Launchable) -> None:
        self._names, self._instead = tuple(tensors), instead
        q = tensors["q"]
        self._heads, self._n, self._d = q.shape[-3:]
        self._entries = self._heads * (q.shape[0] if q.dim() == 4 else 1)
        self._works = -(-self._n // form.queries) * self._entries
        self._programs = multiprocessors_of(q.device)
        #: levels of the first tile have the range of bf16 alone
        wide = q.dtype == torch.bfloat16
        quick = form.quick and wide and self._works <= MARKS * self._programs
        self._form = replace(form, quick=quick)
        self._tiles: dict[str, Tiles] = {
            name: row_tiles(x, ROWS if name in ("q", "phi_q", "o") else form.keys)
            for name, x in tensors.items()
            if name in TILED
        }
        bias_steps = (0, 0)
        if "key_bias" in tensors:
            tiles, *steps = key_tiles(tensors["key_bias"], form.keys)
            self._tiles["key_bias"], bias_steps = tiles, (steps[0], steps[1])
        #: numbers before the marks: of lengths
        self._before = -(-2 * self._heads // WHOLE) * WHOLE if form.reach else 0
        # what calls have in common is worked out once: a call takes the host long enough
        self._common = self._arguments(tensors, bias_steps)
        self._described = [(f"{name}_desc", name, tiles) for name, tiles in self._tiles.items()]
        self._pointers = [(f"{name}_ptr", name) for name in POINTERS if name in tensors]
        self._constants = {again: self.constants(again) for again in (False, True)}
        self._of_lengths = self._lengths_arguments(tensors) if form.reach else {}
        self._launches: dict[str, DirectLaunch | None] = {}

    def run(
        self, device: torch.device, tensors: Iterable[Tensor], numbers: Sequence[float] = ()
    ) -> None:
        """Launch on `device`, on which the tensors are; numbers are the scale and a position."""
        given = tuple(tensors)
        elsewhere = self._form.causal and numbers[1] != 0
        if elsewhere or not works() or any(x.data_ptr() % VECTOR_BYTES for x in given):
            self._instead.run(device, given, numbers)
            return
        try:
            with on_device(device):
                self._run(device, dict(zip(self._names, given, strict=True)), numbers[0])
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            if len(self._launches) > self._form.reach + self._form.quick:
                raise  # all is compiled: no fault of a compiler
            self._instead.run(device, given, numbers)
            if give_up(str(problem)):
                words = "attention runs on the usual kernel, since that for Hopper fails"
                warnings.warn(f"{words} ({type(problem).__name__}: {problem})", stacklevel=2)

    def _run(self, device: torch.device, tensors: Mapping[str, Tensor], scale: float) -> None:
        form, zeros = self._form, None
        if form.quick or form.reach:
            size = self._before + self._works * form.quick
            zeros = torch.zeros(size, dtype=torch.int32, device=device)
        if form.reach:
            self._measure(tensors, zeros)
        values = self.arguments(tensors, scale, zeros)
        self._launch("first", self._works, values, self._constants[False])
        if form.quick:
            self._launch("again", min(self._works, self._programs), values, self._constants[True])

    def arguments(
        self, tensors: Mapping[str, Tensor], scale: float, zeros: Tensor | None
    ) -> dict[str, Any]:
        """Of the kernel, by name, but for the constants of a pass."""
        form, values = self._form, self._common.copy()
        for argument, name, tiles in self._described:
            values[argument] = tiles.of(tensors[name])
        for argument, name in self._pointers:
            values[argument] = tensors[name]
        values["scale"] = scale
        values["to_exp2"] = LOG2E if form.bias != NO_BIAS else scale * LOG2E
        if zeros is not None and form.quick:
            values["marks_ptr"] = zeros[self._before :] if self._before else zeros
        if zeros is not None and form.reach:
            values["lengths_ptr"] = zeros[: 2 * self._heads].view(torch.float32)
        return values

    def _arguments(self, tensors: Mapping[str, Tensor], steps: tuple[int, int]) -> dict[str, Any]:
        """All arguments in the kernel's order, of which calls fill in those that are None."""
        table = tensors.get("table")
        many = dict.fromkeys(("many_qb", "many_qh", "many_kb", "many_kh"), 0)
        if self._form.columns:
            sizes = (*self._tiles["phi_q"].shape[:2], *self._tiles["phi_k"].shape[:2])
            many = {name: int(size > 1) for name, size in zip(many, sizes, strict=True)}
        return {
            "q_desc": None, "phi_q_desc": None, "k_desc": None, "v_desc": None, "phi_k_desc": None,
            "key_bias_desc": None, "o_desc": None, "marks_ptr": None, "slopes_ptr": None,
            "lengths_ptr": None, "table_ptr": None,
            "table_step": 0 if table is None or len(table) == 1 else table.stride(0),
            "codes_q_ptr": None, "codes_k_ptr": None, "scale": None, "to_exp2": None,
            "N": self._n, "H": self._heads, "entries": self._entries, "near": self._near(),
            "works": self._works, **many, "many_bb": steps[0], "many_bh": steps[1],
        }  # fmt: skip

    def constants(self, again: bool) -> dict[str, Any]:
        """Those of a pass, in the kernel's order."""
        form = self._form
        if again:
            form = replace(form, quick=False, again=True, overlap=False, turns=False)
        return {
            "FORM": form.code(), "MATH_REGS": form.math_registers,
            "COPY_REGS": form.copy_registers, "num_warps": WARPS,
        }  # fmt: skip

    def _near(self) -> int:
        """Heads whose keys and values the cache holds, in parts of about the same size."""
        fit = max(1, CACHED_BYTES // (self._n * self._d * 4))
        return -(-self._entries // -(-self._entries // fit))

    def _lengths_arguments(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        q, k = (x if x.dim() == 4 else x[None] for x in (tensors["q"], tensors["k"]))
        return {
            "q_ptr": None, "k_ptr": None, "out_ptr": None,
            **dict(zip(("q_b", "q_h", "q_n"), q.stride()[:3], strict=True)),
            **dict(zip(("k_b", "k_h", "k_n"), k.stride()[:3], strict=True)),
            "N": self._n, "H": self._heads, "D": self._d, "BLOCK": LENGTHS_BLOCK,
        }  # fmt: skip

    def _measure(self, tensors: Mapping[str, Tensor], zeros: Tensor | None) -> None:
        """The largest lengths of queries and keys, into the first zeros."""
        own = {"q_ptr": tensors["q"], "k_ptr": tensors["k"], "out_ptr": zeros}
        programs = -(-self._n // LENGTHS_BLOCK) * self._entries
        self._launch("lengths", programs, self._of_lengths | own, {}, _lengths_kernel)

    def _launch(
        self,
        name: str,
        programs: int,
        values: Mapping[str, Any],
        constants: Mapping[str, Any],
        kernel: Any = None,
    ) -> None:
        known = self._launches.get(name)
        if known is not None:
            known(programs, [*values.values(), *constants.values()])
            return
        most = self._form.most_registers
        options = {} if kernel is not None or most is None else {"maxnreg": most}
        made = (kernel or _kernel)()[(programs,)](**values, **constants, **options)
        self._launches[name] = described(made)


@cache
def _kernel() -> Any:
    from .kernel import attention_kernel

    return attention_kernel


@cache
def _lengths_kernel() -> Any:
    from .lengths import lengths_kernel

    return lengths_kernel
