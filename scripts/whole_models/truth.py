"""How far outputs are from the truth, beside what rounding does to the original."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from failures import lacked_beside_others
from torch import Tensor

from flashbias_convert.benchmark.judge import outputs_of
from flashbias_convert.benchmark.rows import failure, release
from flashbias_convert.verification.difference import Accumulator, Difference

from .case import BY_ROWS, ORIGINAL, WITHOUT_BIAS, Case

#: times the error that is allowed to an exact conversion, which is twice the original's rounding
_WRONG = 2.0
_HOW = {ORIGINAL: "original in float32", BY_ROWS: "original's formula by rows"}


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
        plain: of the original, or of its formula by rows, in the dtype in use, eager; None if it
            could not be had.
        how: where `wide` comes from, or why there is none.
    """

    wide: dict[str, Tensor] | None
    plain: dict[str, Tensor] | None
    how: str


@torch.no_grad()
def find_truth(case: Case, options: Options) -> Truth:
    """The first sample through the original, in float32 and in the dtype in use.

    Where the original is out of memory in float32, its formula is computed a few rows at a time.
    TF32 is off: by default convolutions would use it.

    Raises:
        Exception: there is none, and memory lacked that others may hold
            (`failures.lacked_beside_others`): another run may have it.
    """
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return _find_truth(case, options)


def _find_truth(case: Case, options: Options) -> Truth:
    wide, said = _first_that_works(case, options, torch.float32)
    how = f"none: {said}" if wide is None else _HOW[said]  # without it rows are worth their times
    # without it there is nothing to set an error beside; a few rows at a time round as the whole
    return Truth(wide, _first_that_works(case, options, options.dtype)[0], how)


def _first_that_works(
    case: Case, options: Options, dtype: torch.dtype
) -> tuple[dict[str, Tensor] | None, str]:
    """Outputs of the original, or of its formula by rows, and which; or why there are none."""
    why, lacked = "", None
    for way in (ORIGINAL, BY_ROWS):
        found = None
        try:
            found = _first_sample(case, way, options, dtype)
        except Exception as error:
            why = failure(error)
            lacked = error.with_traceback(None) if lacked_beside_others(error) else lacked
            del error
        release(options.device)
        if found is not None:
            return found, way
    if lacked is not None:
        raise lacked
    return None, why


def save_truth(truth: Truth, path: Path) -> None:
    """Write it for other processes; the file is whole or not there."""
    part = path.with_suffix(".part")
    torch.save(vars(truth), part)
    part.rename(path)


def load_truth(path: Path) -> Truth:
    """What `save_truth` wrote; none if whoever should have written it died."""
    if not path.is_file():
        return Truth(None, None, "none: its process died")
    return Truth(**torch.load(path, weights_only=True))


def _first_sample(case: Case, way: str, options: Options, dtype: torch.dtype) -> dict[str, Tensor]:
    ready = case.prepare(way, options.device, dtype, weights=options.dtype, batch=1)
    return outputs_of(ready.model(*ready.args, **ready.kwargs), 1)


def errors_of(
    found: dict[str, Tensor],
    truth: Truth,
    dtype: torch.dtype,
    way: str,
    *,
    approximate: bool = False,
) -> dict[str, Any]:
    """Columns about outputs; "status" among them if they are wrong.

    Args:
        found: outputs of the row.
        truth: what they are compared with.
        dtype: in use.
        way: of the row; one without a bias is never wrong.
        approximate: nor is one whose biases are truncated on purpose.
    """
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
    other = way in WITHOUT_BIAS
    judged = "another function" if other else str(worst.within_rounding)
    numbers |= {"rounding_max": f"{worst.rounding_max:.3g}",
                "rounding_rms": f"{worst.rounding_rms:.3g}", "within_rounding": judged}  # fmt: skip
    if not (other or approximate) and _is_wrong(worst):
        times = worst.error_rms / worst.rounding_rms
        numbers |= {"status": "wrong", "reason": f"wrong outputs: {times:.0f} times the rounding"}
    return numbers


def _is_wrong(found: Difference) -> bool:
    """Whether this is no rounding any more: at least twice what an exact conversion may be off.

    Where the original rounds no more than the truth does, nothing can be said.
    """
    return found.rounding_rms > 0 and not found.error_rms <= _WRONG * found.allowed_rms
