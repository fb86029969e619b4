"""Rows, each in a process of its own: what a peer does to its card ends that row alone."""

from __future__ import annotations

import argparse
import fnmatch
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from turns import Wait, in_turns

from .case import Case
from .measuring import measure_row
from .truth import Options, find_truth, load_truth, save_truth
from .writing import COLUMNS, Table, machine

#: makes the cases, tiny or not, once more in every process: a function of a module
Find = Callable[[bool], Iterable[Case]]
#: further columns, by model and variant
More = dict[tuple[str, str], dict[str, str]]


@dataclass(frozen=True)
class Job:
    """What a process needs to know; pickle takes it.

    Attributes:
        find, tiny: make the cases.
        model: name of one of them.
        variant: of the row; "" for the truth.
        how: it is measured.
        truth: file that holds it, or will.
        table, columns: file of the rows, and its columns beyond the usual ones.
        extra: their values.
    """

    find: Find
    tiny: bool
    model: str
    variant: str
    how: Options
    truth: Path
    table: Path
    columns: tuple[str, ...] = ()
    extra: dict[str, str] = field(default_factory=dict)

    def case(self) -> Case:
        """Made anew."""
        return next(case for case in self.find(self.tiny) if case.name == self.model)


def run_apart(
    find: Find,
    options: argparse.Namespace,
    table: Table,
    *,
    models: Sequence[str] | None = None,
    more: More | None = None,
) -> None:
    """Measure every variant of every case that is asked for, `options.together` rows at a time.

    Args:
        find: see `Find`.
        options: of `bench_models.add_options`.
        table: takes the rows.
        models: names of cases, in order; None means all.
        more: see `More`.
    """
    how = Options(torch.device(options.device), getattr(torch, options.dtype), options.repeats,
                  options.limit_s)  # fmt: skip
    where = machine(how.device, how.dtype)
    cases = {case.name: case for case in find(options.tiny)}
    left = [
        (name, variant)
        for name in (cases if models is None else models)
        for variant in chosen(cases[name].variants(), options.variants)
        if not table.has(name, variant, where["device"])
    ]
    ends = time.monotonic() + (options.stop_s or math.inf)
    columns = table.columns[len(COLUMNS) :]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            Job(find, options.tiny, name, variant, how, _file(folder, list(cases).index(name)),
                table.path, columns, (more or {}).get((name, variant), {}))
            for name, variant in left
        ]  # fmt: skip
        jobs = _with_truths(jobs, options.together)
        calls = [(job,) for job in jobs]
        seconds = None if math.isinf(ends) else ends - time.monotonic()
        lost = in_turns(measure_job, calls, together=options.together, seconds=seconds)
        table.read()
        late = time.monotonic() > ends
        for (job,) in lost:
            if late:
                print(f"stopped before {job.model}, {job.variant}")
            elif not table.has(job.model, job.variant, where["device"]):  # died before it wrote
                table.add({**_known(cases[job.model], job), **where, **job.extra})


def _file(folder: str, number: int) -> Path:
    return Path(folder) / f"{number}.pt"


def _known(case: Case, job: Job) -> dict[str, object]:
    return {"model": job.model, "variant": job.variant, "batch": case.batch, "tokens": case.tokens,
            "status": "failed", "reason": "its process died"}  # fmt: skip


def _with_truths(jobs: Sequence[Job], together: int) -> list[Job]:
    """Find what rows are compared with, once for every model; of one sample, so beside others.

    Returns:
        The jobs, without those of a model whose truth lacked memory that others may hold: a row
        without errors would stay so.
    """
    wanted, died = list({job.truth: (job,) for job in jobs}.values()), set()
    for (job,) in in_turns(truth_job, wanted, together=together, timed=False):
        print(f"  no truth for {job.model}: its process died")
        died.add(job.truth)
    found = [job for job in jobs if job.truth.is_file() or job.truth in died]
    for name in dict.fromkeys(job.model for job in jobs if job not in found):
        print(f"  no rows of {name}: no memory for what they are compared with", flush=True)
    return found


def truth_job(job: Job, wait: Wait) -> None:
    """Find what the rows of a model are compared with, and write it.

    Kernel by kernel: a process that is stopped for another one's measurement goes on with what it
    has launched, and in float32 that may be seconds of work beside it.
    """
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # read when the card is first used, which is later
    save_truth(find_truth(job.case(), job.how), job.truth)
    wait()


def measure_job(job: Job, wait: Wait) -> None:
    """Measure a row, and write it when it is its turn."""
    waited = False

    def once() -> None:
        nonlocal waited
        if not waited:
            waited = True
            wait()

    row = measure_row(job.case(), job.variant, job.how, load_truth(job.truth), once)
    once()  # a row that failed before its first call has not waited
    table = Table(job.table, job.columns, resume=True, begin=False)
    table.add({**row, **machine(job.how.device, job.how.dtype), **job.extra})


def chosen(names: Iterable[str], patterns: Sequence[str] | None) -> list[str]:
    """Those that match, in the order of the patterns."""
    names = list(names)
    found = (n for p in patterns or ["*"] for n in names if fnmatch.fnmatchcase(n, p))
    return list(dict.fromkeys(found))
