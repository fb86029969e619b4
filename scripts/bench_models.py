"""Whole models, eager and compiled: original, patched by hand, without a bias, converted.

python scripts/bench_models.py [--models NAME...] [--variants NAME...] [--tiny] [--device cpu]

Models are those of `--list`; "families" stands for one real model of every recipe. Variants are a
way to compute attention ("original", "sdpa", "sdpa-cudnn", "flex", "flex-alibi", "none",
"none-cudnn", "none-flex", "ours", "forced", "exact", "svd-56") in eager mode, or with a mode after
it: "-compiled", "-graphs" (CUDA graphs), "-warm" (compiled after a call in eager mode), "-layers"
(blocks compiled one by one). "sdpa" and "flex" have the bias as a dense matrix, made once; "-cudnn"
has cuDNN's kernel in the place of the one that torch chooses; "flex-alibi" computes ALiBi inside
FlexAttention; "original-fused" is the original with its library's own switch for fused attention,
where one is off by default. "ours" is what this package decides, "forced" what it would do where it
leaves every site alone, "exact" keeps every bit of the bias; of the plain Transformer and of
attention alone it keeps factors in half precision, as the others keep the matrix. "svd-56"
truncates Pangu-Weather's biases as the paper does.

Weights are random; position biases are drawn from the trained examples where there are some. Times
are those of CUDA events around calls, after a write that flushes the cache; "replay_ms" is that of
a compiled model recorded as a CUDA graph: what its kernels take without the host. Memory is the
peak of a call beyond weights and inputs, with everything that is kept of biases. Errors are those
of the first sample's outputs against the original in float32, with the same weights; "rounding" is
the original's own in the same dtype. A row that is off by more than four times that computes
something else: it is "wrong", and takes no part in ratios. Without a bias, and where this package
truncates biases, rows are never that. "graphs" and "graph_breaks" tell how a row was compiled,
"cudagraph_skips" how often CUDA graphs were given up.

Rows are written one by one. What fails or takes longer than --limit-s is a row with its reason;
after --stop-s no row is begun. --resume keeps the rows of the file and adds those that it lacks.
What lacks memory beside other commands (`beside.py`) is no row, unless the whole card is too small.
Every row has a process of its own: a peer that crashes, or leaves the card unusable, ends its row.
With --together N, so many rows at a time compile beside each other and are then timed one after the
other; "first_call_s" has little meaning there, and all their models must fit the card at once. What
the rows of a model are compared with is computed once, before them.
"""

from __future__ import annotations

import argparse
import fnmatch
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from failures import lacked_beside_others, no_row
from whole_models import families, figure, language, plain, small_tables, vision, weather
from whole_models.case import ROOT, Case
from whole_models.measuring import measure_row
from whole_models.running import chosen, run_apart
from whole_models.truth import Options, find_truth
from whole_models.writing import Table, machine, summary

#: what ratios of the summary are to
REFERENCES = (
    "original-compiled",
    "sdpa-compiled",
    "sdpa-cudnn-compiled",
    "flex-compiled",
    "none",
    "none-compiled",
    "none-cudnn-compiled",
)


def all_cases(tiny: bool) -> dict[str, Case]:
    """Every model by its name on the command line."""
    rooms = (vision, language, plain, weather, small_tables, families)
    return {name: case for room in rooms for name, case in room.cases(tiny).items()}


def every_case(tiny: bool) -> list[Case]:
    """See `all_cases`."""
    return list(all_cases(tiny).values())


def add_options(parser: argparse.ArgumentParser, output: str) -> None:
    """What all scripts that measure whole models understand."""
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="patterns; default all")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=0.0, help="for a row; 0: none")
    parser.add_argument("--stop-s", type=float, default=0.0, help="begin no row after; 0: none")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--together", type=int, default=1, help="rows that compile at a time")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts/results" / output)


def run(cases: Iterable[Case], options: argparse.Namespace, table: Table) -> None:
    """As `running.run_apart`, in this process: for cases that cannot be made in another.

    Args:
        cases: in order; without peers that may leave the card unusable.
        options: of `add_options`.
        table: takes the rows.
    """
    started = time.monotonic()
    device = torch.device(options.device)
    how = Options(device, getattr(torch, options.dtype), options.repeats, options.limit_s)
    where = machine(device, how.dtype)
    for case in cases:
        truth = None
        for variant in chosen(case.variants(), options.variants):
            if table.has(case.name, variant, where["device"]):
                continue
            if options.stop_s and time.monotonic() - started > options.stop_s:
                print(f"stopped before {case.name}, {variant}")
                return
            try:
                truth = truth or find_truth(case, how)
                row = measure_row(case, variant, how, truth)
            except Exception as problem:
                if not lacked_beside_others(problem):
                    raise
                print(no_row(f"{case.name}, {variant}", problem), flush=True)
                continue
            table.add({**row, **where})


def main() -> None:
    """Measure, write, draw and print a summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="patterns; default all")
    parser.add_argument("--list", action="store_true", help="print names and leave")
    add_options(parser, "bench_models.csv")
    options = parser.parse_args()
    cases = all_cases(options.tiny)
    if options.list:
        for name, case in cases.items():
            print(f"{name:28s} {case.name:36s} {' '.join(case.variants())}")
        return
    patterns = ["family-*" if p == "families" else p for p in options.models or ["*"]]
    unknown = [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in cases)]
    if unknown:
        parser.error(f"no model is called {unknown[0]!r}; see --list")
    table = Table(options.output, resume=options.resume)
    models = [cases[name].name for name in chosen(cases, patterns)]
    run_apart(every_case, options, table, models=models)
    figure.draw(table.rows, options.output.with_suffix(".png"))
    print(summary(table.rows, REFERENCES))


if __name__ == "__main__":
    main()
