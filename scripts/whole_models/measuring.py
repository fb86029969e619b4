"""From a case and a variant to a row: time, memory, and how far the outputs are from the truth."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from flashbias_convert.benchmark.judge import outputs_of
from flashbias_convert.benchmark.rows import failure, release
from flashbias_convert.benchmark.stand_ins import complaining
from flashbias_convert.benchmark.timing import Measured, allocated, measure
from flashbias_convert.verification.difference import Accumulator, Difference

from .case import BY_ROWS, NO_BIAS, ORIGINAL, WAYS, Case, Prepared, split_variant

#: seconds of timed calls per row, at most
_TIMED_S = 10.0


class OverTheLimit(BaseException):
    """A row has taken too long. No `Exception`: compilers must not catch it and carry on."""


@dataclass(frozen=True)
class Options:
    """How rows are measured.

    Attributes:
        device: where.
        dtype: of models and inputs.
        repeats: timed calls per row.
        limit_s: seconds for a row, compiling included; 0 means no limit.
    """

    device: torch.device
    dtype: torch.dtype
    repeats: int = 20
    limit_s: float = 0.0


@dataclass(frozen=True)
class Truth:
    """What the first sample is compared with.

    Attributes:
        wide: of the original in float32; None if it could not be had.
        plain: of the original in the dtype in use, eager; None if it could not be had.
        how: where `wide` comes from, or why there is none.
    """

    wide: dict[str, Tensor] | None
    plain: dict[str, Tensor] | None
    how: str


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OverTheLimit` in the block after so many seconds; 0 means never."""

    def stop(*_: Any) -> None:
        raise OverTheLimit

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@torch.no_grad()
def find_truth(case: Case, options: Options) -> Truth:
    """The first sample through the original, in float32 and in the dtype in use.

    Where the original is out of memory in float32, its formula is computed a few rows at a time.
    TF32 is off: by default convolutions would use it.
    """
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return _find_truth(case, options)


def _find_truth(case: Case, options: Options) -> Truth:
    wide, how = None, "original in float32"
    for way in (ORIGINAL, BY_ROWS):
        try:
            wide = _first_sample(case, way, options, torch.float32)
        except Exception as error:  # without it, rows are still worth their times
            how = f"none: {failure(error)}"
            del error
        release(options.device)
        if wide is not None:
            how = "original in float32" if way == ORIGINAL else "original's formula by rows"
            break
    plain = None
    # without it there is nothing to set an error beside
    with contextlib.suppress(Exception):
        plain = _first_sample(case, ORIGINAL, options, options.dtype)
    release(options.device)
    return Truth(wide, plain, how)


def _first_sample(case: Case, way: str, options: Options, dtype: torch.dtype) -> dict[str, Tensor]:
    ready = case.prepare(way, options.device, dtype, weights=options.dtype, batch=1)
    return outputs_of(ready.model(*ready.args, **ready.kwargs), 1)


@torch.no_grad()
def measure_row(case: Case, variant: str, options: Options, truth: Truth) -> dict[str, Any]:
    """One row, whatever happens; the columns are those of `writing.COLUMNS`."""
    way, mode = split_variant(variant)
    row: dict[str, Any] = {
        "model": case.name, "variant": variant, "what": WAYS[way], "mode": mode,
        "batch": case.batch, "tokens": case.tokens, "status": "measured",
    }  # fmt: skip
    _forget_compiled(options.device)
    try:
        with time_limit(options.limit_s), complaining():
            row |= _measured(case, way, mode, options, truth)
    except OverTheLimit:
        row |= {"status": "failed", "reason": f"over the limit of {options.limit_s:g} s"}
    except Exception as error:  # how a variant fails is its result
        row |= {"status": "failed", "reason": failure(error)}
        del error
    _forget_compiled(options.device)
    release(options.device)
    return row


def _forget_compiled(device: torch.device) -> None:
    """What was compiled before holds memory, and counts against the limits of what comes."""
    torch.compiler.reset()
    counters.clear()
    if device.type == "cuda":
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def _measured(case: Case, way: str, mode: str, options: Options, truth: Truth) -> dict[str, Any]:
    device = options.device
    started, base = time.perf_counter(), allocated(device)
    ready = case.prepare(way, device, options.dtype)
    prepared_s = time.perf_counter() - started
    if mode == "warm":
        ready.model(*ready.args, **ready.kwargs)
    model = compiled(ready.model, mode)
    seen: list[dict[str, Tensor]] = []

    def call() -> Any:
        if mode == "graphs":  # outputs of the last replay may be written over
            torch.compiler.cudagraph_mark_step_begin()
        return model(*ready.args, **ready.kwargs)

    found = measure(
        call,
        device,
        repeats=options.repeats,
        before=base + weight_bytes(ready),
        budget_s=_TIMED_S,
        look=lambda output: seen.append(outputs_of(output, case.batch)),
    )
    return {
        **_numbers(found, case.batch),
        "bias_mib": f"{bias_bytes(ready.model) / 2**20:.1f}",
        "prepare_s": f"{prepared_s:.1f}",
        "graphs": counters["stats"].get("unique_graphs", 0),
        "graph_breaks": sum(counters["graph_break"].values()),
        **_errors(seen[0], truth, options.dtype, way),
    }


def compiled(model: nn.Module, mode: str) -> Any:
    """The model as a mode has it.

    Raises:
        RuntimeError: no blocks to compile one by one.
    """
    if mode == "eager":
        return model
    if mode == "layers":
        blocks = [m for m in model.modules() if type(m).__name__.endswith(("Block", "Layer"))]
        # a layer of blocks is none: it would be unrolled
        innermost = [b for b in blocks if not any(x in blocks for x in list(b.modules())[1:])]
        if not innermost:
            raise RuntimeError("no blocks to compile one by one")
        for block in innermost:
            block.compile(dynamic=False)
        return model
    how = {"mode": "reduce-overhead"} if mode == "graphs" else {}
    return torch.compile(model, dynamic=False, **how)


def _numbers(found: Measured, batch: int) -> dict[str, Any]:
    times = found.times
    return {
        "median_ms": f"{times.median_ms:.4f}",
        "p20_ms": f"{times.p20_ms:.4f}",
        "p80_ms": f"{times.p80_ms:.4f}",
        "repeats": times.repeats,
        "per_second": f"{1e3 * batch / times.median_ms:.2f}",
        "peak_mib": "" if found.peak_mib is None else f"{found.peak_mib:.1f}",
        "first_call_s": f"{found.first_call_s:.1f}",
    }


def _errors(found: dict[str, Tensor], truth: Truth, dtype: torch.dtype, way: str) -> dict[str, Any]:
    if truth.wide is None:
        return {"truth": truth.how}
    plain = truth.plain
    worst: Difference | None = None
    for name, wide in truth.wide.items():
        collected = Accumulator(dtype)
        collected.add(wide if plain is None else plain[name], found[name], wide)
        one = collected.result()
        if worst is None or not one.error_rms <= worst.error_rms:
            worst = one
    assert worst is not None
    if worst.not_finite:
        return {"truth": truth.how, "status": "wrong", "reason": f"NaN in {worst.not_finite}"}
    numbers = {
        "truth": truth.how,
        "error_max": f"{worst.error_max:.3g}",
        "error_rms": f"{worst.error_rms:.3g}",
        "largest": f"{worst.largest:.3g}",
    }
    if plain is None:
        return numbers
    judged = "another function" if way == NO_BIAS else str(worst.within_rounding)
    return {**numbers, "rounding_max": f"{worst.rounding_max:.3g}",
            "rounding_rms": f"{worst.rounding_rms:.3g}", "within_rounding": judged}  # fmt: skip


def weight_bytes(ready: Prepared) -> int:
    """Bytes of parameters and of inputs, which no variant can do without."""
    inputs = [x for x in (*ready.args, *ready.kwargs.values()) if isinstance(x, Tensor)]
    return _bytes([*ready.model.parameters(), *inputs])


def bias_bytes(model: nn.Module) -> int:
    """Bytes of what is kept of biases: dense matrices, terms, and what they were prepared to."""
    kept = [x for name, x in model.named_buffers() if name.rpartition(".")[2] == "bias"]
    kept += [x for name, x in model.named_buffers() if "score_bias." in f"{name}."]
    known = [x for m in model.modules() for x, _ in getattr(m, "known", {}).values()]
    return _bytes([*kept, *(x for x in known if isinstance(x, Tensor))])


def _bytes(tensors: list[Any]) -> int:
    """Every storage once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())
