"""From a case and a variant to a row: time, memory, and how far the outputs are from the truth."""

from __future__ import annotations

import contextlib
import copy
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from failures import lacked_beside_others
from torch import Tensor, nn
from torch._dynamo.utils import counters

from flashbias_convert.benchmark.judge import outputs_of
from flashbias_convert.benchmark.rows import failure, release
from flashbias_convert.benchmark.stand_ins import complaining
from flashbias_convert.benchmark.timing import Measured, allocated, measure

from .case import WAYS, Case, Prepared, split_variant
from .truth import Options, Truth, errors_of

#: seconds of timed calls per row, at most
_TIMED_S = 10.0


class OverTheLimit(BaseException):
    """A row has taken too long. No `Exception`: compilers must not catch it and carry on."""


@contextlib.contextmanager
def _untimed() -> Iterator[None]:
    """The limit of the block around does not run in this one."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)


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


def at_once() -> None:
    """What nobody has to wait for."""


@torch.no_grad()
def measure_row(
    case: Case, variant: str, options: Options, truth: Truth, wait: Callable[[], None] = at_once
) -> dict[str, Any]:
    """One row, whatever happens but one thing; the columns are those of `writing.COLUMNS`.

    Args:
        case, variant, options, truth: what is measured.
        wait: called after the first call, before any that is timed; its time does not count against
            the limit.

    Raises:
        Exception: memory lacked that others may hold (`failures.lacked_beside_others`), which is no
            result.
    """
    way, mode = split_variant(variant)
    row: dict[str, Any] = {
        "model": case.name, "variant": variant, "what": WAYS[way], "mode": mode,
        "batch": case.batch, "tokens": case.tokens, "status": "measured",
    }  # fmt: skip
    if mode != "eager" and not case.pads_strides:
        row["what"] += ", strides not padded"
    _forget_compiled(options.device)
    try:
        with time_limit(options.limit_s), complaining(), strides(case.pads_strides):
            row |= _measured(case, way, mode, options, truth, wait)
    except OverTheLimit:
        row |= {"status": "failed", "reason": f"over the limit of {options.limit_s:g} s"}
    except Exception as error:  # how a variant fails is its result
        if lacked_beside_others(error):
            raise
        row |= {"status": "failed", "reason": failure(error)}
        del error
    finally:
        # after an illegal access a card does nothing any more
        with contextlib.suppress(RuntimeError):
            _forget_compiled(options.device)
            release(options.device)
    return row


def strides(padded: bool) -> contextlib.AbstractContextManager[Any]:
    """What is compiled in the block has strides that are padded, where torch does so, or not."""
    from torch._inductor import config

    return contextlib.nullcontext() if padded else config.patch(comprehensive_padding=False)


def _forget_compiled(device: torch.device) -> None:
    """What was compiled before holds memory, and counts against the limits of what comes."""
    torch.compiler.reset()
    counters.clear()
    if device.type == "cuda":
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def _measured(
    case: Case, way: str, mode: str, options: Options, truth: Truth, wait: Callable[[], None]
) -> dict[str, Any]:
    device = options.device
    started, base = time.perf_counter(), allocated(device)
    ready = case.prepare(way, device, options.dtype)
    prepared_s = time.perf_counter() - started
    if mode == "warm":  # with copies: a call fills a slot of a cache
        args, kwargs = copy.deepcopy((ready.args, ready.kwargs))
        ready.model(*args, **kwargs)
        del args, kwargs
    model = compiled(ready.model, mode)
    seen: list[dict[str, Tensor]] = []

    def call() -> Any:
        if mode == "graphs":  # outputs of the last replay may be written over
            torch.compiler.cudagraph_mark_step_begin()
        return model(*ready.args, **ready.kwargs)

    def look(output: Any) -> None:
        seen.append(outputs_of(output, case.batch))
        with _untimed():
            wait()

    found = measure(
        call,
        device,
        repeats=options.repeats,
        before=base + weight_bytes(ready),
        budget_s=_TIMED_S,
        look=look,
    )
    return {
        **_numbers(found, case.batch),
        "replay_ms": _replayed(call, device, options.repeats) if mode == "compiled" else "",
        "bias_mib": f"{bias_bytes(ready.model) / 2**20:.4f}",
        "prepare_s": f"{prepared_s:.1f}",
        "graphs": counters["stats"].get("unique_graphs", 0),
        "graph_breaks": sum(counters["graph_break"].values()),
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"] if mode == "graphs" else "",
        **errors_of(seen[0], truth, options.dtype, way, approximate=ready.approximate),
    }


def _replayed(call: Callable[[], Any], device: torch.device, repeats: int) -> str:
    """Milliseconds of the same kernels without Python between them; nothing if that is impossible.

    A compiled model that is recorded as one CUDA graph, as whoever serves small models would.
    """
    if device.type != "cuda":
        return ""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception as error:  # synchronises, or does something else that cannot be recorded
        if lacked_beside_others(error):
            raise
        print(f"  no CUDA graph: {failure(error)}")
        return ""
    found = measure(graph.replay, device, repeats=repeats, budget_s=_TIMED_S)
    return f"{found.times.median_ms:.4f}"


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


def weight_bytes(ready: Prepared) -> int:
    """Bytes of parameters and of inputs, which no variant can do without."""
    inputs = [x for x in (*ready.args, *ready.kwargs.values()) if isinstance(x, Tensor)]
    return _bytes([*ready.model.parameters(), *inputs])


def bias_bytes(model: nn.Module) -> int:
    """Bytes of dense matrices and of terms; forms packed for the kernel count in the peak alone."""
    kept = [x for name, x in model.named_buffers() if name.rpartition(".")[2] == "bias"]
    kept += [x for name, x in model.named_buffers() if "score_bias." in f"{name}."]
    known = [x for m in model.modules() for x, _ in getattr(m, "known", {}).values()]
    return _bytes([*kept, *(x for x in known if isinstance(x, Tensor))])


def _bytes(tensors: list[Any]) -> int:
    """Every storage once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())
