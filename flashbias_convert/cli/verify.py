"""``flashbias-convert verify``: does the converted model still say what the original says?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .exit_codes import ExitCode
from .groups import Building, Speaking, grouped
from .output import Output, print_error
from .parameters import (
    CheckpointArg,
    ReportOpt,
)
from .reports import check_report, write_report
from .show import ConvertedArg
from .values import json_object, load_recipes
from .verification import (
    INPUTS_HELP,
    SAMPLES,
    BatchOpt,
    CompareDtype,
    Comparing,
    MaxDifferenceOpt,
    MinAgreementOpt,
    SeedOpt,
    TokenizerOpt,
    quiet_libraries,
)

InputsOpt = Annotated[str, typer.Option(metavar="PATH|random", help=INPUTS_HELP)]
SamplesOpt = Annotated[int, typer.Option(help="How many at most.")]
TokensOpt = Annotated[
    int | None, typer.Option(help="Length of a sequence.", show_default="128 or less")
]
DeviceOpt = Annotated[str, typer.Option(help="Where to compare: cpu, cuda, cuda:1 ...")]
DtypeOpt = Annotated[CompareDtype, typer.Option(help="In which to compare.")]
ForceOpt = Annotated[bool, typer.Option("--force", metavar="", help="Replace an existing report.")]


@grouped
def verify(
    original: CheckpointArg,
    converted: ConvertedArg,
    building: Building,
    speaking: Speaking,
    inputs: InputsOpt = "random",
    samples: SamplesOpt = SAMPLES,
    batch: BatchOpt = 8,
    seed: SeedOpt = 0,
    tokens: TokensOpt = None,
    tokenizer: TokenizerOpt = None,
    dtype: DtypeOpt = CompareDtype.float32,
    device: DeviceOpt = "cpu",
    max_difference: MaxDifferenceOpt = None,
    min_agreement: MinAgreementOpt = None,
    report: ReportOpt = None,
    force: ForceOpt = False,
) -> int:
    """Compare a converted checkpoint with its original, site by site and end to end.

    Beside every difference stands what rounding alone does to the original. An exact conversion
    must stay within twice that; one with truncated terms is judged by the limits you give.
    The exit code is 4 where they do not agree.
    """
    comparing = Comparing(
        inputs=inputs,
        samples=samples,
        batch=batch,
        seed=seed,
        tokens=tokens,
        tokenizer=tokenizer,
        dtype=dtype.value,
        device=device,
        max_difference=max_difference,
        min_agreement=min_agreement,
    )
    comparing.check()
    built_with = json_object(building.arch_args)
    check_report(report, sources=(original, converted, *_files(inputs)), force=force)
    output = Output(speaking.json, speaking.quiet, speaking.verbose)
    quiet_libraries(building.arch, inputs)
    with output.progress("reading", "comparing") as progress:
        found = comparing.run(
            original,
            converted,
            arch=building.arch,
            arch_args=built_with,
            recipes=load_recipes(tuple(building.recipe or ())),
            progress=progress,
        )
    code = ExitCode.DONE if found.passed else ExitCode.NOT_VERIFIED

    def data() -> dict[str, Any]:
        names = {"command": "verify", "original": str(original), "converted": str(converted)}
        return {**names, "exit_code": int(code), "verification": found.to_json()}

    from .verdicts import verification_lines

    output.result(data, *verification_lines(found, output.width))
    write_report(report, data, force)
    if not found.passed:
        print_error(f"not verified: {'; '.join(found.reasons)}")
    return code


def _files(inputs: str) -> tuple[Path, ...]:
    path = Path(inputs)
    return (path,) if path.exists() else ()
