"""Rows of the Pairformer's table, one by one: a run that is cut keeps what it has."""

from __future__ import annotations

import csv
import fnmatch
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashbias_convert.benchmark.timing import allocated, measure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from whole_models.measuring import OverTheLimit, time_limit

COLUMNS = (
    "n", "mode", "component", "way", "rank", "ms", "p20_ms", "p80_ms", "once_ms", "steps_200_ms",
    "peak_mib", "error", "status", "dtype", "device", "torch",
)  # fmt: skip
#: what tells a row from others
KEY = ("n", "mode", "component", "way", "rank", "dtype", "device")
#: denoising steps of a structure
STEPS = 200
#: seconds of timed calls per row, at most
BUDGET_S = 10.0


class Stopped(Exception):
    """No further row is begun."""


@dataclass
class Trial:
    """What a row measures.

    Attributes:
        call: what is timed.
        error: of its output; None where it would say nothing.
        once_ms: what was made once for many calls took so long; None where nothing was.
        steps: whether a structure takes 200 such calls.
    """

    call: Callable[[], Any]
    error: Callable[[], float] | None = None
    once_ms: float | None = None
    steps: bool = False


class Table:
    """A file of rows.

    Args:
        path: of the file.
        device: where calls run.
        dtype: of their tensors.
        repeats: calls to time.
        limit_s: seconds for a row, preparations and compilation included; 0 means no limit.
        stop_s: seconds after which no row is begun; 0 means never.
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
        stop_s: float = 0.0,
        resume: bool = False,
        ways: Sequence[str] = ("*",),
    ) -> None:
        self.path, self.device = path, torch.device(device)
        self._repeats, self._limit_s, self._ways = repeats, limit_s, tuple(ways)
        self._stop = time.monotonic() + stop_s if stop_s else float("inf")
        cuda = self.device.type == "cuda"
        card = torch.cuda.get_device_name(device) if cuda else "CPU"
        self._where = {"dtype": str(dtype)[6:], "device": card, "torch": torch.__version__}
        self.rows: list[dict[str, str]] = []
        if resume and path.is_file():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows)
        self._known = {_key(row) for row in self.rows}

    def wants(self, way: str) -> bool:
        """Whether a way is among those that are measured."""
        return any(fnmatch.fnmatchcase(way, pattern) for pattern in self._ways)

    def time(self, prepare: Callable[[], Trial], **facts: Any) -> None:
        """Add a row; what fails, or takes too long, says so.

        Args:
            prepare: makes the trial; not called for a row that is there.
            **facts: columns of the row.

        Raises:
            Stopped: it is too late for another row.
        """
        row = {name: str(facts.get(name, "")) for name in COLUMNS} | self._where
        if _key(row) in self._known or (row["way"] and not self.wants(row["way"])):
            return
        if time.monotonic() > self._stop:
            raise Stopped(f"stopped before {row['component']}, {row['way']} at N = {row['n']}")
        try:
            with time_limit(self._limit_s):
                row |= self._measured(prepare())
            row["status"] = "ok"
        except OverTheLimit:
            row["status"] = f"over the limit of {self._limit_s:g} s"
        except Exception as problem:  # one peer that cannot must not stop the others
            row["status"] = f"failed: {type(problem).__name__}: {str(problem).splitlines()[:1]}"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.rows.append(row)
        self._known.add(_key(row))
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)
        print(*(row[name] for name in COLUMNS[:13]), flush=True)

    def _measured(self, trial: Trial) -> dict[str, str]:
        before = allocated(self.device)
        found = measure(
            trial.call, self.device, repeats=self._repeats, before=before, budget_s=BUDGET_S
        )
        once = trial.once_ms
        return {
            "ms": f"{found.times.median_ms:.4f}",
            "p20_ms": f"{found.times.p20_ms:.4f}",
            "p80_ms": f"{found.times.p80_ms:.4f}",
            "once_ms": "" if once is None else f"{once:.3f}",
            "steps_200_ms": f"{(once or 0) + STEPS * found.times.median_ms:.2f}"
            if trial.steps
            else "",
            "peak_mib": "" if found.peak_mib is None else f"{found.peak_mib:.0f}",
            "error": "" if trial.error is None else f"{trial.error():.3g}",
        }

    def good(self, **facts: Any) -> list[dict[str, str]]:
        """The rows that were measured here, with these columns."""
        wanted = {**self._where, **{k: str(v) for k, v in facts.items()}, "status": "ok"}
        return [row for row in self.rows if all(row[k] == v for k, v in wanted.items())]


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
    for column, what in (("ms", "one step"), ("steps_200_ms", f"{STEPS} steps")):
        limit = float(bias[column])
        ranks = sorted((int(r["rank"]), float(r[column])) for r in rows if r["way"] == factors)
        faster = [rank for rank, spent in ranks if spent < limit]
        slower = [rank for rank, spent in ranks if spent >= limit]
        upto = f"up to rank {max(faster)}" if faster else "at no rank that was tried"
        but = f" (not at {', '.join(map(str, slower))})" if slower else ""
        told.append(f"{what}: factors are faster than the dense bias {upto}{but}")
    return told
