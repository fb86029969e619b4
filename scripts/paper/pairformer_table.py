"""Rows of the Pairformer's table, one by one: a run that is cut keeps what it has."""

from __future__ import annotations

import contextlib
import csv
import fnmatch
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashbias_convert.benchmark.timing import allocated, measure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from failures import is_lost, lacked_beside_others, no_row
from whole_models.measuring import OverTheLimit, time_limit

COLUMNS = (
    "n", "mode", "component", "way", "rank", "ms", "p20_ms", "p80_ms", "replay_ms", "once_ms",
    "steps_200_ms", "peak_mib", "error", "library_error", "gradient_error",
    "library_gradient_error", "bias_gradient_error", "chosen", "status", "dtype", "device", "torch",
)  # fmt: skip
#: what tells a row from others
KEY = ("n", "mode", "component", "way", "rank", "dtype", "device")
#: denoising steps of a structure
STEPS = 200
#: seconds of timed calls per row, at most
BUDGET_S = 4.0
#: what was running when a process died stands in a file of this name
MARK = ".running"
#: the status there of what ran when another process had died, or been stopped, in the same row
SECOND = "second try"
#: a row without errors, because float64 does not fit
NO_ERROR = "ok, but no memory for its errors"
#: so many times the error of the plain formula is no rounding any more
WRONG = 10.0


class Stopped(Exception):
    """No further row is begun."""


class Broken(Exception):
    """A call broke the card's context: what follows needs another process."""


@dataclass
class Trial:
    """What a row measures.

    Attributes:
        call: what is timed.
        errors: columns with its errors; None where they would say nothing.
        once_ms: what was made once for many calls took so long; None where nothing was.
        steps: whether a structure takes 200 such calls.
        exact: another error than rounding means that it is wrong.
        replays: it can be recorded as a CUDA graph, whose time is on the card alone.
        chosen: what the rule of `factors_once` says.
    """

    call: Callable[[], Any]
    errors: Callable[[], dict[str, float]] | None = None
    once_ms: float | None = None
    steps: bool = False
    exact: bool = False
    replays: bool = False
    chosen: str = ""


class Table:
    """A file of rows.

    Args:
        path: of the file.
        device: where calls run.
        dtype: of their tensors.
        repeats: calls to time.
        limit_s: seconds for a row, preparations and compilation included; 0 means no limit.
        ends: no row is begun after this, see `time.monotonic`.
        resume: keep the rows of a file that is there, and measure what it lacks.
        ways: patterns for the ways that are measured.

    Attributes:
        rows: all rows as text, those that were there before included.
    """

    def __init__(
        self,
        path: Path,
        device: str,
        dtype: torch.dtype,
        *,
        repeats: int = 20,
        limit_s: float = 0.0,
        ends: float = math.inf,
        resume: bool = False,
        ways: Sequence[str] = ("*",),
    ) -> None:
        self.path, self.device = path, torch.device(device)
        self._repeats, self._limit_s, self._ways = repeats, limit_s, tuple(ways)
        self._ends = ends
        cuda = self.device.type == "cuda"
        card = torch.cuda.get_device_name(device) if cuda else "CPU"
        self._where = {"dtype": str(dtype)[6:], "device": card, "torch": torch.__version__}
        self.rows: list[dict[str, str]] = []
        if resume and path.is_file():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))
        _write(path, self.rows)
        self._known = {_key(row) for row in self.rows}
        self._mark = path.with_suffix(MARK)
        self._tried: tuple[str, ...] | None = None
        if self._mark.is_file():
            row = next(csv.DictReader(self._mark.read_text().splitlines()), None)
            if row is None:  # ended while it was written
                self._mark.unlink()
                return
            if resume and row["status"] != SECOND:
                self._tried = _key(row)  # whoever ends a run ends some row, which may be sound
                return
            self._mark.unlink()
            if resume and _key(row) not in self._known:
                self._add(row | {"status": "failed: twice the process ended while it ran"})

    def wants(self, way: str) -> bool:
        """Whether a way is among those that are measured."""
        return any(fnmatch.fnmatchcase(way, pattern) for pattern in self._ways)

    def time(self, prepare: Callable[[], Trial], **facts: Any) -> None:
        """Add a row; what fails, or takes too long, says so.

        What lacks memory that other commands may hold is printed, and no row.

        Args:
            prepare: makes the trial; not called for a row that is there.
            **facts: columns of the row.

        Raises:
            Stopped: it is too late for another row.
            Broken: the card's context is lost.
        """
        row = {name: str(facts.get(name, "")) for name in COLUMNS} | self._where
        if not self.lacks(row):
            return
        if time.monotonic() > self._ends:
            raise Stopped(f"stopped before {row['component']}, {row['way']} at N = {row['n']}")
        _write(self._mark, [row | {"status": SECOND if _key(row) == self._tried else ""}])
        lost = lacked = False
        try:
            with time_limit(self._limit_s):
                row |= self._measured(prepare())
        except OverTheLimit:
            row["status"] = f"over the limit of {self._limit_s:g} s"
        except Exception as problem:  # one peer that cannot must not stop the others
            row["status"] = f"failed: {type(problem).__name__}: {str(problem).splitlines()[:1]}"
            lost, lacked = is_lost(problem), lacked_beside_others(problem)
            if lacked:
                what = f"{row['component']}, {row['way']}, N = {row['n']}"
                print(no_row(what, problem), flush=True)
        if not lacked:
            self._add(row)
        self._mark.unlink()
        if lost:
            raise Broken(row["status"])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def lacks(self, row: dict[str, str]) -> bool:
        """Whether a row is to be measured, and is not there yet."""
        return _key(row) not in self._known and (not row["way"] or self.wants(row["way"]))

    def _add(self, row: dict[str, str]) -> None:
        self.rows.append(row)
        self._known.add(_key(row))
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS, restval="").writerow(row)
        shown = COLUMNS[: COLUMNS.index("status") + 1]
        print(*(row.get(name, "") for name in shown if row.get(name)), flush=True)

    def _measured(self, trial: Trial) -> dict[str, str]:
        before = allocated(self.device)
        found = measure(
            trial.call, self.device, repeats=self._repeats, before=before, budget_s=BUDGET_S
        )
        once = trial.once_ms
        status, errors = "ok", {}
        try:
            errors = {} if trial.errors is None else trial.errors()
            status = "wrong" if trial.exact and is_wrong(errors) else "ok"
        except torch.OutOfMemoryError as problem:
            if lacked_beside_others(problem):
                raise
            status = NO_ERROR
        return {
            "status": status,
            "ms": f"{found.times.median_ms:.4f}",
            "p20_ms": f"{found.times.p20_ms:.4f}",
            "p80_ms": f"{found.times.p80_ms:.4f}",
            "once_ms": "" if once is None else f"{once:.3f}",
            "steps_200_ms": f"{(once or 0) + STEPS * found.times.median_ms:.2f}"
            if trial.steps
            else "",
            "replay_ms": self._replayed(trial) if trial.replays else "",
            "chosen": trial.chosen,
            "peak_mib": "" if found.peak_mib is None else f"{found.peak_mib:.0f}",
            **{name: f"{value:.3g}" for name, value in errors.items()},
        }

    def _replayed(self, trial: Trial) -> str:
        """Milliseconds without Python between kernels; nothing where that cannot be recorded."""
        if self.device.type != "cuda":
            return ""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                trial.call()
        except Exception as problem:
            if is_lost(problem) or lacked_beside_others(problem):
                raise
            print(f"  no CUDA graph: {str(problem).splitlines()[:1]}", flush=True)
            return ""
        found = measure(graph.replay, self.device, repeats=self._repeats, budget_s=BUDGET_S)
        return f"{found.times.median_ms:.4f}"

    def good(self, **facts: Any) -> list[dict[str, str]]:
        """The rows that were measured here, with these columns."""
        wanted = {**self._where, **{k: str(v) for k, v in facts.items()}, "status": "ok"}
        return [row for row in self.rows if all(row[k] == v for k, v in wanted.items())]


class WarmUp(Table):
    """Calls what is to be measured once, so that it is compiled; measures and writes nothing.

    Args:
        path: rows of this file are not called.
        device, dtype, **options: as for the table.
    """

    #: the others compile nothing
    COMPILED = ("ours*", "Flex*", "cuEquivariance", "SDPA*")

    def __init__(self, path: Path, device: str, dtype: torch.dtype, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            if path.is_file():
                copy.write_bytes(path.read_bytes())
            super().__init__(copy, device, dtype, **{**options, "resume": True})

    def time(self, prepare: Callable[[], Trial], **facts: Any) -> None:
        row = {name: str(facts.get(name, "")) for name in COLUMNS} | self._where
        way = row["way"]
        if not self.lacks(row) or not any(fnmatch.fnmatchcase(way, p) for p in self.COMPILED):
            return
        if time.monotonic() > self._ends:
            raise Stopped("no time to get ready")
        # whatever happens here happens again, and then it is written
        with contextlib.suppress(OverTheLimit, Exception), time_limit(self._limit_s):
            prepare().call()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def is_wrong(errors: dict[str, float]) -> bool:
    """Whether an exact way is off by more than rounding; NaN is."""
    for name in ("error", "gradient_error"):
        if name in errors and not errors[name] <= WRONG * errors[f"library_{name}"]:
            return True
    return False


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _key(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def break_even(rows: Sequence[dict[str, str]], dense: str, factors: str) -> list[str]:
    """Sentences: up to which rank factors take less time than the dense bias.

    Args:
        rows: of one component and length.
        dense, factors: names of the two ways.
    """
    (bias,) = (row for row in rows if row["way"] == dense)
    told = []
    columns = {
        "one step": lambda row: _number(row, "ms"),
        "one step, the card alone": lambda row: _number(row, "replay_ms"),
        f"{STEPS} steps": lambda row: _number(row, "steps_200_ms"),
        # steps of a row may wait for Python, and then say little of what factors save
        f"{STEPS} steps, the card alone": _replayed_steps,
    }
    for what, spent_in in columns.items():
        limit = spent_in(bias)
        if limit is None:
            continue
        found = ((int(r["rank"]), spent_in(r)) for r in rows if r["way"] == factors)
        ranks = sorted((rank, spent) for rank, spent in found if spent is not None)
        faster = [rank for rank, spent in ranks if spent < limit]
        slower = [rank for rank, spent in ranks if spent >= limit]
        upto = f"up to rank {max(faster)}" if faster else "at no rank that was tried"
        but = f" (not at {', '.join(map(str, slower))})" if slower else ""
        told.append(f"{what}: factors are faster than the dense bias {upto}{but}")
    return told


def pays_from(rows: Sequence[dict[str, str]], dense: str, factors: str) -> list[str]:
    """Sentences: from how many steps on factors take less time, what is made once included.

    Args:
        rows, dense, factors: see `break_even`.
    """
    (bias,) = (row for row in rows if row["way"] == dense)
    told = []
    for what, column in (("", "ms"), (", the card alone", "replay_ms")):
        limit, found = _number(bias, column), []
        for row in (r for r in rows if r["way"] == factors):
            step, once = _number(row, column), _number(row, "once_ms")
            if limit is None or step is None or once is None:
                continue
            more = once - (_number(bias, "once_ms") or 0)
            steps = math.floor(more / (limit - step)) + 1 if step < limit else None
            found.append(f"{row['rank']}: {'never' if steps is None else max(1, steps)}")
        if found:
            told.append(f"steps from which factors pay, by rank{what}: {', '.join(found)}")
    return told


def _number(row: dict[str, str], column: str) -> float | None:
    return float(row[column]) if row.get(column) else None


def _replayed_steps(row: dict[str, str]) -> float | None:
    """What is made once, and all steps without Python between kernels; ms."""
    once, step = _number(row, "once_ms"), _number(row, "replay_ms")
    return None if once is None or step is None else once + STEPS * step
