"""Benchmark a converted model beside its original, in memory."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..attention.backends import device_problem
from ..errors import UsageError
from ..inputs import Batch, as_inputs
from ..inspection import library_versions
from ..plan import Plan
from ..verification.models import converted_sites, is_exact
from ..verification.placing import device_of, dtype_name, dtype_of, placed, wider
from .break_even import MOST_KINDS, break_even, kinds_of_sites, lengths
from .calls import CallGroup, call_groups
from .models import ROWS, Models, model_rows, unsteady
from .result import BenchmarkReport, BreakEven, Case, SiteGroup
from .rows import Timing, release
from .sites import site_group

#: called with (steps done, steps in all as far as is known, name of the present one)
Progress = Callable[[int, int, str], None]
#: default largest length of a break-even, on a card and elsewhere
MAX_TOKENS = {"cuda": 8192, "cpu": 256}
#: default number of timed calls per row
REPEATS = {"cuda": 20, "cpu": 5}
_ROWS_OF_A_SITE = 5
_SWITCHED_OFF = "it has to be compiled, and compiling was switched off"
_SLOW_ON_CPU = "on the CPU nothing is compiled for every length: it takes too long"
CPU_NOTE = (
    "these are times of a CPU, where the converted model runs torch's attention instead of the "
    "kernel: they say nothing about a GPU"
)


@torch.no_grad()
def benchmark_model(
    original: nn.Module,
    converted: nn.Module,
    inputs: Any,
    *,
    plan: Plan | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    repeats: int | None = None,
    compile: bool = True,
    max_tokens: int | None = None,
    notes: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> BenchmarkReport:
    """Time and memory of both models, of their attention, and of what could take its place.

    Every row is compared with a reference in a wider dtype: one whose outputs are wrong is marked
    wrong, one that raises is marked failed, with the reason. On CUDA, times are those of events
    around eager calls, after a write that flushes the cache; on the CPU they are those of the
    clock. Both models are as before afterwards.

    Args:
        original: not patched, in evaluation mode.
        converted: patched, in evaluation mode, with modules of the same names.
        inputs: a tensor, a tuple of arguments, a mapping of keyword arguments, a list or another
            iterable of such calls, or `Inputs`; a tuple is always one call; every call is measured
            by itself.
        plan: of the conversion; it tells which terms are exact. Without it, every low-rank term
            counts as truncated.
        dtype: float32, float16 or bfloat16; default that of the original.
        device: where to measure; default that of the original.
        repeats: timed calls per row; default 20 on CUDA, 5 elsewhere.
        compile: whether to measure compiled models and FlexAttention, too.
        max_tokens: largest length at which the attention is measured to find where it breaks even
            with a dense bias, by powers of two from 16 on; 0 leaves that out. Default 8192 on
            CUDA, 256 elsewhere.
        notes: go into the result.
        progress: see `Progress`.

    Raises:
        UsageError: models that cannot be compared, no inputs, or numbers that make no sense.
        FlashBiasError: the original does not take the inputs.
        StaleTermsError: weights have changed since the conversion.
    """
    started = time.perf_counter()
    if repeats is not None and repeats < 1:
        raise UsageError(f"repeats must be at least 1, got {repeats}")
    if max_tokens is not None and max_tokens < 0:
        raise UsageError(f"max_tokens must be at least 0, got {max_tokens}")
    sites = converted_sites(original, converted)
    dtype = dtype or dtype_of(original)
    place = _with_index(torch.device(device) if device is not None else device_of(original))
    models = Models(
        placed(original, place, dtype),
        placed(converted, place, dtype),
        dtype,
        wider(dtype),
        all(is_exact(name, module, plan) for name, module in sites.items()),
    )
    given = as_inputs(inputs, model=original)
    batches = list(given.batches)
    if not batches:
        raise UsageError("there are no inputs to measure with")
    most = max_tokens if max_tokens is not None else _default(MAX_TOKENS, place)
    repeats = repeats if repeats is not None else _default(REPEATS, place)
    timing = Timing(place, repeats, "" if compile else _SWITCHED_OFF)
    run = _Run(models, timing, most, _Steps(progress, len(batches) * ROWS))
    with torch.autocast(place.type, enabled=False):
        cases = tuple(run.case(batch.to(place, dtype)) for batch in batches)
        crossings = run.break_even()
    return BenchmarkReport(
        device=str(place),
        device_name=_device_name(place),
        dtype=dtype_name(dtype),
        versions=library_versions(),
        threads=torch.get_num_threads() if place.type == "cpu" else None,
        repeats=repeats,
        backend=_backend(place),
        cases=cases,
        break_even=crossings,
        notes=(*_notes(place, run.left_out), *notes, *given.notes),
        seconds=time.perf_counter() - started,
    )


class _Steps:
    """Counts rows for a progress bar."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, -1

    def expect(self, more: int) -> None:
        self._total += more

    def __call__(self, name: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, max(self._total, self._done + 1), name)


class _Run:
    """Measures one batch after the other, and keeps the kinds of sites that it met."""

    def __init__(self, models: Models, timing: Timing, most: int, step: _Steps) -> None:
        self._models, self._timing, self._most, self._step = models, timing, most, step
        self._groups: list[CallGroup] = []
        self.left_out = 0

    def case(self, batch: Batch) -> Case:
        rows = model_rows(self._models, batch, self._timing, step=self._step)
        try:
            groups, silent = call_groups(self._models.converted, batch)
        except torch.OutOfMemoryError:
            release(self._timing.device)
            note = "its attention was not measured: the converted model is out of memory"
            return Case(_described(batch), batch.size, rows, (), (*unsteady(rows), note))
        self._step.expect(len(groups) * _ROWS_OF_A_SITE)
        measured: list[SiteGroup] = [site_group(g, self._timing, self._step) for g in groups]
        self._groups += [replace(g, call=g.call.of_sizes_alone(), kwargs={}) for g in groups]
        notes = (*unsteady(rows), *_silent(silent))
        return Case(_described(batch), batch.size, rows, tuple(measured), notes)

    def break_even(self) -> tuple[BreakEven, ...]:
        if not self._most:
            return ()
        kinds = kinds_of_sites(self._groups)
        self.left_out = max(0, len(kinds) - MOST_KINDS)
        kinds = kinds[:MOST_KINDS]
        timing = self._timing
        if timing.device.type != "cuda" and not timing.no_compile:
            timing = Timing(timing.device, timing.repeats, _SLOW_ON_CPU)
        self._step.expect(len(kinds) * len(lengths(self._most)) * _ROWS_OF_A_SITE)
        return tuple(break_even(kind, self._most, timing, self._step) for kind in kinds)


def _silent(names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (f"{names[0]}{more} did not run converted attention with these inputs",)


def _notes(place: torch.device, left_out: int) -> tuple[str, ...]:
    notes = [] if place.type == "cuda" else [CPU_NOTE]
    if left_out:
        notes.append(f"break-even: {left_out} more kinds of sites were not measured")
    return tuple(notes)


def _described(batch: Batch) -> str:
    named = [*((f"{i}", v) for i, v in enumerate(batch.args)), *batch.kwargs.items()]
    shapes = [
        f"{'input' if name == '0' else name} {tuple(value.shape)}"
        for name, value in named
        if isinstance(value, torch.Tensor)
    ]
    return f"batch {batch.size}: {', '.join(shapes)}"


def _default(known: dict[str, int], device: torch.device) -> int:
    return known.get(device.type, known["cpu"])


def _with_index(device: torch.device) -> torch.device:
    """cuda as cuda:0 and so on: tensors say where they are in this way."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _backend(device: torch.device) -> str:
    problem = device_problem(device)
    if problem is None:
        return "the Triton kernel"
    return f"torch's attention with concatenated factors, because {problem}"
