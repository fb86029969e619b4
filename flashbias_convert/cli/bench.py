"""``flashbias-convert bench``: what does a conversion gain, here and on these shapes?"""

from __future__ import annotations

import csv as csv_module
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..options import DecomposeOptions
from .benchmarking import Benching
from .exit_codes import ExitCode
from .groups import Building, Deciding, Speaking, grouped
from .output import Output, print_error
from .parameters import (
    CheckpointArg,
    ForceOpt,
)
from .reports import check_report, write_file
from .values import json_object
from .verification import INPUTS_HELP, BatchOpt, CompareDtype, SeedOpt, quiet_libraries

if TYPE_CHECKING:  # these import torch, which takes seconds: not before the options are known
    from ..benchmark import BenchmarkReport

_PANEL = "What to measure"
_OUT = "Output"
OriginalOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="The original of a converted file. Default: the one that lies beside it, else its own "
        "weights, which are those of the original.",
        show_default=False,
    ),
]
InputsOpt = Annotated[
    str, typer.Option(metavar="PATH|random", help=INPUTS_HELP, rich_help_panel=_PANEL)
]
LengthsOpt = Annotated[
    list[int] | None,
    typer.Option(
        "--tokens",
        help="Length of a sequence; repeatable, every length is measured by itself.",
        rich_help_panel=_PANEL,
        show_default="128 or less",
    ),
]
DtypeOpt = Annotated[
    CompareDtype | None,
    typer.Option(
        help="Of the models.",
        rich_help_panel=_PANEL,
        show_default="bfloat16 on a card, float32 on the CPU",
    ),
]
DeviceOpt = Annotated[
    str | None,
    typer.Option(
        help="Where: cpu, cuda, cuda:1 ...",
        rich_help_panel=_PANEL,
        show_default="a card, if there is one",
    ),
]
RepeatsOpt = Annotated[
    int | None,
    typer.Option(
        help="Timed calls per row.",
        rich_help_panel=_PANEL,
        show_default="20 on a card, 5 on the CPU",
    ),
]
CompileOpt = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile",
        help="Measure compiled models and FlexAttention, too; compiling takes its time.",
        rich_help_panel=_PANEL,
    ),
]
MaxTokensOpt = Annotated[
    int | None,
    typer.Option(
        help="Largest length at which attention is measured to find the break-even; 0 leaves it "
        "out.",
        rich_help_panel=_PANEL,
        show_default="8192 on a card, 256 on the CPU",
    ),
]
CsvOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a table.", rich_help_panel=_OUT, show_default=False),
]
FigureOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.png",
        help="Write a figure. Needs matplotlib.",
        rich_help_panel=_OUT,
        show_default=False,
    ),
]


@grouped
def bench(
    checkpoint: CheckpointArg,
    deciding: Deciding,
    building: Building,
    speaking: Speaking,
    original: OriginalOpt = None,
    inputs: InputsOpt = "random",
    batch: BatchOpt = 8,
    tokens: LengthsOpt = None,
    seed: SeedOpt = 0,
    dtype: DtypeOpt = None,
    device: DeviceOpt = None,
    repeats: RepeatsOpt = None,
    compile: CompileOpt = True,
    max_tokens: MaxTokensOpt = None,
    csv: CsvOpt = None,
    plot: FigureOpt = None,
    force: ForceOpt = False,
) -> int:
    """Measure time and memory of the original, of the converted model, and of their peers.

    Of a converted file, or of an original that is converted in memory. Every row is compared with
    the original: what computes something else is marked wrong. Nothing is written but what --csv
    and --plot ask for. The exit code is 4 where the converted model is wrong, and 1 where it or
    the original could not be run.
    """
    benching = Benching(
        checkpoint=checkpoint,
        original=original,
        inputs=inputs,
        batch=batch,
        tokens=tuple(tokens or ()),
        seed=seed,
        dtype=None if dtype is None else dtype.value,
        device=device,
        repeats=repeats,
        compile=compile,
        max_tokens=max_tokens,
        options=DecomposeOptions(**deciding.options()),
        **deciding.sites(),
        recipe_files=tuple(building.recipe or ()),
        arch=building.arch,
        arch_args=json_object(building.arch_args),
    )
    benching.check()
    _check_files(benching, csv, plot, force)
    output = Output(speaking.json, speaking.quiet, speaking.verbose)
    quiet_libraries(building.arch, inputs)
    with output.steps("reading") as progress:
        report, source, failed_sites = benching.run(progress)
    code = _code(report, failed_sites)

    def data() -> dict[str, Any]:
        about = {"command": "bench", "input": str(checkpoint), "source": source}
        return {**about, "exit_code": int(code), "benchmark": report.to_dict()}

    from .benchmark_tables import benchmark_lines

    wrote = _write(report, csv, plot, force)
    output.result(data, source, *benchmark_lines(report, output.width), *wrote)
    if code is not ExitCode.DONE:
        print_error(_problem(report, failed_sites))
    return code


def _check_files(benching: Benching, csv: Path | None, plot: Path | None, force: bool) -> None:
    """Raise UsageError for files that cannot be written; before all work."""
    sources = benching.sources()
    check_report(csv, sources=sources, force=force, option="--csv")
    check_report(plot, sources=sources, force=force, option="--plot")
    if plot is None:
        return
    if plot.suffix != ".png":
        raise UsageError(f"the figure {plot} must end in .png", "choose another name for --plot")
    if csv is not None and csv.resolve() == plot.resolve():
        raise UsageError("--csv and --plot name the same file")
    from ..plotting import require_matplotlib

    require_matplotlib()


def _write(report: BenchmarkReport, csv: Path | None, plot: Path | None, force: bool) -> list[str]:
    if csv is not None:
        from ..benchmark.flat import COLUMNS, flat_rows

        text = io.StringIO(newline="")
        writer = csv_module.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat_rows(report))
        write_file(csv, lambda path: path.write_text(text.getvalue(), encoding="utf-8"), force)
    if plot is not None:
        from ..benchmark.figure import benchmark_figure
        from ..plotting import save_figure

        figure = benchmark_figure(report)
        write_file(plot, lambda path: save_figure(figure, path), force)
    return [f"wrote {path}" for path in (csv, plot) if path is not None]


def _ends(report: BenchmarkReport) -> list[tuple[str, str, str]]:
    """Name, status and reason of the rows that decide over the exit code."""
    from ..benchmark.models import CONVERTED, CONVERTED_COMPILED, ORIGINAL

    rows = [r for n in (CONVERTED, ORIGINAL, CONVERTED_COMPILED) for r in report.rows(n)]
    # a compiler that fails is no fault of the conversion
    return [
        (row.name, row.status, row.reason)
        for row in rows
        if row.status == "wrong" or (row.status == "failed" and row.name != CONVERTED_COMPILED)
    ]


def _code(report: BenchmarkReport, failed_sites: int) -> ExitCode:
    found = [(name, status) for name, status, _ in _ends(report)]
    if any(status == "wrong" and name.startswith("converted") for name, status in found):
        return ExitCode.NOT_VERIFIED
    if any(status == "failed" for _, status in found):
        return ExitCode.FAILED
    return ExitCode.PARTLY if failed_sites else ExitCode.DONE


def _problem(report: BenchmarkReport, failed_sites: int) -> str:
    found = [f"{name} {_IS[status]}: {reason}" for name, status, reason in _ends(report)]
    if not found:
        found = [f"{failed_sites} sites could not be converted and stayed as they were"]
    return "; ".join(dict.fromkeys(found))


_IS = {"wrong": "is wrong", "failed": "failed"}
