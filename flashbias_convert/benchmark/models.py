"""Whole models on one batch: original and converted, eager and compiled, and peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import FlashBiasError
from ..inputs import Batch
from ..verification.placing import placed
from . import stand_ins
from .calls import Attend, attending
from .judge import Judgement, Reference, first_sample, judge_model, outputs_of, run_eager
from .peers import FLEX, NO_BIAS, SDPA
from .result import Row
from .rows import Timing, failure, release, timed_row, with_ratios
from .sites import OTHER_FUNCTION, Step

ORIGINAL = "original, eager"
ORIGINAL_COMPILED = "original, compiled"
#: measured a second time, at the end: it tells how far other ratios can be trusted
ORIGINAL_AGAIN = "original, eager, again"
CONVERTED = "converted, eager"
CONVERTED_COMPILED = "converted, compiled"
_FLEX_ON_CPU = "on the CPU it is measured per site only: compiling it takes too long"


@dataclass(frozen=True, eq=False)
class Models:
    """Two models where they are measured.

    Attributes:
        original, converted: on the device, in the dtype.
        wide_dtype: of references.
        exact: whether the conversion changes nothing but rounding.
    """

    original: nn.Module
    converted: nn.Module
    dtype: torch.dtype
    wide_dtype: torch.dtype
    exact: bool


@dataclass(frozen=True, eq=False)
class _Contender:
    """A row to be measured."""

    name: str
    model: nn.Module
    compiled: bool = False
    attend: Callable[[], Attend] | None = None
    refusal: str = ""
    #: whether it must agree with the converted model instead of the original
    of_converted: bool = True
    has_bias: bool = True
    around: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


def _contenders(models: Models, timing: Timing) -> list[_Contender]:
    off = timing.no_compile
    flex_off = off or ("" if timing.device.type == "cuda" else _FLEX_ON_CPU)
    before, after = models.original, models.converted
    return [
        _Contender(ORIGINAL, before, of_converted=False),
        _Contender(ORIGINAL_COMPILED, before, True, refusal=off, of_converted=False),
        _Contender(SDPA, after, attend=stand_ins.dense_sdpa),
        _Contender(
            FLEX,
            after,
            attend=stand_ins.dense_flex,
            refusal=flex_off,
            around=stand_ins.complaining,
        ),
        _Contender(CONVERTED, after),
        _Contender(CONVERTED_COMPILED, after, True, refusal=off),
        _Contender(NO_BIAS, after, attend=stand_ins.no_bias, has_bias=False),
        _Contender(ORIGINAL_AGAIN, before, of_converted=False),
    ]


ROWS = 8
#: how many times as long the original may take at one end of the rows as at the other
_STEADY = 1.2


def unsteady(rows: Sequence[Row]) -> tuple[str, ...]:
    """A note, where the machine was not equally fast from the first row to the last."""
    times = {row.name: row.median_ms for row in rows}
    first, last = times.get(ORIGINAL), times.get(ORIGINAL_AGAIN)
    if first is None or last is None or max(first, last) <= _STEADY * min(first, last):
        return ()
    return (
        f"the machine was not equally fast all the time: the original took {first:.4g} ms at first "
        f"and {last:.4g} ms at the end, so ratios of these rows mean little",
    )


def model_rows(
    models: Models, batch: Batch, timing: Timing, *, step: Step | None = None
) -> tuple[Row, ...]:
    """Time all rows on a batch that is on the device, in the dtype.

    Raises:
        FlashBiasError: the original does not take this batch.
        StaleTermsError: the converted model has changed since its conversion.
    """
    one = first_sample(batch)
    original = _reference(models.original, one, models, timing)
    own = original
    if not models.exact:
        own = _reference(models.converted, one, models, timing)
    rows = []
    for each in _contenders(models, timing):
        if step is not None:
            step(each.name)
        if each.refusal:
            rows.append(Row(each.name, "not measured", reason=each.refusal))
            continue
        against = own if each.of_converted else original
        judge = _judge(each, models, batch.size, original, against)
        rows.append(_row(each, batch, timing, judge))
        release(timing.device)
    return with_ratios(rows, (ORIGINAL, ORIGINAL_COMPILED))


def _row(each: _Contender, batch: Batch, timing: Timing, judge: Callable[[Any], Judgement]) -> Row:
    def make() -> Callable[[], Any]:
        model: Any = each.model
        if each.compiled:
            model = torch.compile(model, dynamic=False)
        return lambda: model(*batch.args, **batch.kwargs)

    torch.compiler.reset()  # what was compiled before counts against its limits
    standing = nullcontext() if each.attend is None else attending(each.model, each.attend())
    with standing, each.around():
        return timed_row(each.name, make, judge, timing, size=batch.size)


def _judge(
    each: _Contender,
    models: Models,
    size: int,
    original: Reference | None,
    own: Reference | None,
) -> Callable[[Any], Judgement]:
    def judge(output: Any) -> Judgement:
        if not each.has_bias:
            return OTHER_FUNCTION
        found = outputs_of(output, size)
        if original is None or own is None:
            return Judgement(True, "not compared: out of memory even with one sample")
        approximate = each.of_converted and not models.exact
        return judge_model(found, original, own, models.dtype, approximate=approximate)

    return judge


def _reference(model: nn.Module, one: Batch, models: Models, timing: Timing) -> Reference | None:
    """What a model says to one sample, in both dtypes; None where memory does not allow that."""
    try:
        plain = run_eager(model, one)
    except torch.OutOfMemoryError:
        release(timing.device)
        return None
    except FlashBiasError:
        raise
    except Exception as error:  # a model may refuse its inputs in any way
        name = type(model).__name__
        raise FlashBiasError(f"{name} does not run: {failure(error)}", "do the inputs fit?") from (
            error
        )
    problem = ""
    try:
        wide_model = placed(model, timing.device, models.wide_dtype)
        wide = run_eager(wide_model, one.to(dtype=models.wide_dtype))
        return Reference(plain, wide)
    except Exception as error:  # no reference: differences are shown and not judged
        problem = f"no reference in the wider dtype: {failure(error)}"
    release(timing.device)
    return Reference(plain, None, problem)
