"""What training steps of attention cost in every way that gives them, on this card.

python scripts/measure_training_costs.py [--dtypes bfloat16 float16 ...] [--lengths N ...]
python scripts/measure_training_costs.py --tiny --device cpu --output FILE.csv [--resume]

Forward plus backward on the card alone (CUDA graph replays), of the kernels with the same bits
every time, of those with atomics, and of torch's attention with concatenated columns: without a
bias, with factors (frozen and trained), with a key bias, causal or not. Every length has about the
same number of scores. Kernels are compiled in parallel processes first. Writes the table that
`backend="auto"` chooses with, `flashbias_convert/attention/training_costs.csv`, row by row, keeping
rows of other cards and dtypes (with --resume also those of this card, dtype and these versions),
and prints what it chooses now. A way that cannot run has no row, and is printed.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attention_shapes import Shape
from backward_step import Step
from row_file import VERSIONS, Row, RowFile
from turns import alone

from flashbias_convert import KeyBias, LowRank, ScoreBias
from flashbias_convert.attention import PreparedBias, flashbias_attention, training_costs
from flashbias_convert.attention.training_costs import KEY_BIAS, WAYS, card_class, form_name
from flashbias_convert.benchmark.timing import measure
from flashbias_convert.cost_tables import FIELDS

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "flashbias_convert/attention/training_costs.csv"
HEADS = 8
#: Factor columns: padded ones of the kernels, and of torch's attention three for each of a rank.
KERNEL_COLUMNS, SDPA_COLUMNS = (16, 32, 64), (24, 48, 96, 192)
#: Most columns of q and its factors together that torch's attention takes.
WIDEST = 256
#: Most milliseconds that a measurement replays a graph for, ten times.
REPLAY_MS = 5


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        d, n: head size, and length.
        way, dtype, columns, trained, causal: see `training_costs.form_name`.
        scores: about so many.
        device: where.
    """

    d: int
    n: int
    way: str
    dtype: str
    columns: int
    trained: bool
    causal: bool
    scores: int
    device: str

    @property
    def form(self) -> str:
        """What the table calls it."""
        return form_name(
            self.way, self.dtype, self.columns, trained=self.trained, causal=self.causal
        )

    def shape(self) -> Shape:
        """Of the call."""
        return Shape((max(1, self.scores // (HEADS * self.n**2)),), HEADS, self.n, self.d)

    def step(self) -> Step:
        """Forward and backward pass."""
        torch.manual_seed(0)
        device, dtype = torch.device(self.device), getattr(torch, self.dtype)
        q, k, v = (x.detach().requires_grad_() for x in self.shape().inputs(dtype, device))
        term = self._term(device)
        if term is not None and self.trained:
            term = term.map_tensors(lambda _, x: x.requires_grad_())
        bias = None if term is None else PreparedBias(ScoreBias((term,), HEADS))
        options: dict[str, Any] = {"causal": self.causal, "deterministic": self.way != "atomics"}
        options["backend"] = "sdpa" if self.way == "sdpa" else "triton"
        learnt = list(term.tensors().values()) if term is not None and self.trained else []
        return Step(
            lambda: flashbias_attention(q, k, v, bias, **options),
            [q, k, v, *learnt],
            torch.randn_like(v),
        )

    def _term(self, device: torch.device) -> KeyBias | LowRank | None:
        """What takes so many columns in this way."""
        if self.columns == 0:
            return None
        if self.columns == KEY_BIAS:
            return KeyBias(values=torch.randn(HEADS, self.n, device=device))
        # torch's attention splits every column of a rank in three, the kernels leave them alone
        split = self.way == "sdpa" and self.dtype != "float32"
        rank = self.columns // 3 if split else self.columns
        phi_q, phi_k = torch.randn(2, HEADS, self.n, rank, device=device)
        return LowRank(phi_q=phi_q, phi_k=phi_k / rank, split=None if split else 0)


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """All measurements; what is compared with each other comes together."""
    found = []
    for dtype in options.dtypes:
        for d in options.head_sizes:
            for n in options.lengths:
                for way, columns, trained, causal in _kinds(d, options.tiny):
                    found.append(Job(d, n, way, dtype, columns, trained, causal, options.scores,
                                     options.device))  # fmt: skip
    return found


def _kinds(d: int, tiny: bool) -> Iterator[tuple[str, int, bool, bool]]:
    for columns, trained, causal in (
        (0, False, False), (0, False, True), (KEY_BIAS, False, False), (KEY_BIAS, True, False),
    ):  # fmt: skip
        for way in WAYS:
            yield way, columns, trained, causal
    for trained, causal in ((False, False), (True, False), (True, True)):
        for way in WAYS:
            for columns in SDPA_COLUMNS if way == "sdpa" else KERNEL_COLUMNS:
                small = columns in (SDPA_COLUMNS[0], KERNEL_COLUMNS[0])
                if d + columns <= WIDEST and (small or not (tiny or causal)):
                    yield way, columns, trained, causal


def prepare(job: Job) -> None:
    """Compile what a job launches; failures show again when it is timed."""
    try:
        job.step()()
    except Exception as problem:
        print(job.d, job.n, job.form, str(problem).splitlines()[0][:100], flush=True)


def time_ms(job: Job) -> float:
    """Median milliseconds of a step."""
    step, device = job.step(), torch.device(job.device)
    if device.type != "cuda":
        return measure(step, device, repeats=3).times.median_ms
    from triton.testing import do_bench_cudagraph

    torch.cuda.synchronize()  # the other stream must not overtake what made the inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(do_bench_cudagraph(step, rep=REPLAY_MS, return_mode="median"))


def about(device: torch.device) -> dict[str, str]:
    """The card and versions."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = ""
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    of_class = card_class(device)
    if of_class is None:
        raise SystemExit(f"{card} is of no class of cards that the table knows")
    return {"class": of_class, "card": card, "torch": torch.__version__, "triton": triton}


def table_of(file: Path, jobs: list[Job], of_class: str, resume: bool) -> RowFile:
    """The table, with the rows that these jobs do not replace."""
    replaced = {(job.dtype, of_class) for job in jobs}

    def stays(row: Row) -> bool:
        return (row["form"].split(", ")[1], row["class"]) not in replaced

    key = ("head_size", "n", "form", "class")
    return RowFile(file, FIELDS, key=key, versions=VERSIONS, resume=resume, others=stays)


def facts(job: Job, where: dict[str, str]) -> dict[str, str]:
    """What a row says of what is measured, and where."""
    return {"head_size": str(job.d), "n": str(job.n), "form": job.form, **where}


def told(file: Path, options: argparse.Namespace) -> Iterator[str]:
    """What "auto" chooses by a table where bits do not count, a line for each kind of call."""
    training_costs.TABLE = file
    training_costs._table.cache_clear()
    device = torch.device(options.device)
    for dtype in options.dtypes:
        for d in options.head_sizes:
            for way, columns, trained, causal in _kinds(d, options.tiny):
                if way != "triton":
                    continue
                parts = 1 if columns <= 0 or dtype == "float32" else 3
                kind = (dtype, d, columns, parts * columns, trained, causal)
                spans = training_costs.fastest(device, *kind)
                chosen = [
                    f"{best} to N = {math.isqrt(below - 1)}" if below else best
                    for below, best in spans
                ]
                name = form_name("", dtype, columns, trained=trained, causal=causal)
                yield f"D = {d}{name}: {', '.join(chosen) or 'not measured: as asked for'}"


def arguments() -> argparse.Namespace:
    """The words of a command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float16", "float32"),
                        default=["bfloat16"])  # fmt: skip
    parser.add_argument("--scores", type=int, default=2**26, help="of a call, about")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU computes")
    parser.add_argument("--stop-s", type=float, default=110.0, help="measure nothing after")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the output")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=TABLE)
    options = parser.parse_args()
    if options.tiny:
        options.lengths, options.head_sizes, options.scores = [16, 32], [16], 1
        options.dtypes = ["float32"]
    return options


def main() -> None:
    """Compile, time, print and write."""
    options, started = arguments(), time.monotonic()
    jobs, where = jobs_of(options), about(torch.device(options.device))
    table = table_of(options.output, jobs, where["class"], options.resume)
    jobs = [job for job in jobs if table.find(facts(job, where)) is None]
    if jobs and where["class"] != "cpu":
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            pool.map(prepare, jobs, chunksize=4)
    with alone():
        for done, job in enumerate(jobs):
            if time.monotonic() - started > options.stop_s:
                print(f"stopped after {done} of {len(jobs)} measurements")
                break
            try:
                ms = time_ms(job)
            except Exception as problem:  # no row for a way that cannot run
                print(job.d, job.n, job.form, str(problem).splitlines()[0][:100], flush=True)
                continue
            cost = 1e9 * ms / (job.shape().batch[0] * HEADS * job.n**2)
            row = facts(job, where) | {"ms": f"{ms:.4f}", "ps_per_score": f"{cost:.4f}"}
            print(*list(table.add(row).values())[:5], flush=True)
    if options.output.is_file():
        print(*told(options.output, options), sep="\n")


if __name__ == "__main__":
    main()
