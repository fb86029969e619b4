"""From a call to a row: timed, judged, or failed with its reason."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import StaleTermsError, one_line
from .judge import Judgement
from .result import Row
from .timing import allocated, measure

#: a reason longer than this is cut
_LONGEST = 300


@dataclass(frozen=True)
class Timing:
    """How rows are timed.

    Attributes:
        device: where.
        repeats: timed calls per row.
        no_compile: why nothing is compiled; "" if it is.
        budget_s: see `measure`.
    """

    device: torch.device
    repeats: int
    no_compile: str = ""
    budget_s: float | None = None


def timed_row(
    name: str,
    make: Callable[[], Callable[[], Any]],
    judge: Callable[[Any], Judgement],
    timing: Timing,
    *,
    size: int | None = None,
) -> Row:
    """Prepare a call, time it, and look at what it returns; whatever it raises is the reason.

    Args:
        name: of the row.
        make: prepares the call; not timed, but the memory that it takes is the row's.
        judge: looks at what the first call returned.
        timing: how.
        size: samples per call.

    Raises:
        StaleTermsError: the converted model has changed; no row could be trusted.
    """
    judged: list[Judgement] = []
    before = allocated(timing.device)
    try:
        found = measure(
            make(),
            timing.device,
            before=before,
            repeats=timing.repeats,
            budget_s=timing.budget_s,
            look=lambda result: judged.append(judge(result)),
        )
    except StaleTermsError:
        raise
    except Exception as error:  # a peer may fail in any way; how is the result
        reason = failure(error)
        del error
        release(timing.device)
        return Row(name, "failed", reason=reason)
    (verdict,) = judged
    return Row(
        name,
        "measured" if verdict.passed else "wrong",
        verdict.verdict,
        verdict.reason,
        found.times,
        found.peak_mib,
        None if size is None else 1e3 * size / found.times.median_ms,
        found.first_call_s,
        {},
        verdict.difference_max,
        verdict.difference_rms,
    )


#: how a compiler of kernels says where it failed, and how a traceback ends
_AT_A_LINE = re.compile(r"at \d+:\d+:$")
_RAISED = re.compile(r"[\w.]*(Error|Exception|Resources)\b: ")


def failure(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # compilers say first that they failed, and then why
    said = " ".join(lines[:2] if lines and lines[0].endswith("raised:") else lines[:1])
    if said.endswith("in a subprocess:"):  # the end of its traceback
        raised = [line for line in lines[1:] if _RAISED.match(line)]
        said = raised[-1] if raised else said
    if _AT_A_LINE.search(said) and "^" in lines[:-1]:  # of a kernel, which is shown up to there
        said = f"{said} {lines[lines.index('^') + 1]}"
    text = one_line(f"{type(error).__name__}: {said}")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def release(device: torch.device) -> None:
    """Give back what a row that is over has held of a card."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def with_ratios(rows: Iterable[Row], references: Sequence[str]) -> tuple[Row, ...]:
    """The rows, with how many times as fast as the reference rows each of them is."""
    rows = list(rows)
    times = {row.name: row.median_ms for row in rows}
    known = {name: ms for name in references if (ms := times.get(name)) is not None}
    return tuple(
        replace(row, ratios={name: ms / own for name, ms in known.items()})
        if (own := row.median_ms)
        else row
        for row in rows
    )
