"""What `convert` and `inspect` have in common: run a conversion, and tell about it."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FlashBiasError, UsageError
from ..options import DecomposeOptions, shard_bytes
from .exit_codes import ExitCode
from .output import Output, print_error
from .values import json_object, load_recipes, torch_device

if TYPE_CHECKING:  # these import torch, which takes seconds: not before the options are known
    from ..checkpoint import Conversion
    from ..plan import Plan

_OTHER_REPORT = "choose another name for --report"
#: never the name of a report: a slip must not cost a checkpoint
_WEIGHTS = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".tar", ".mdlus")


@dataclass(frozen=True)
class Request:
    """What the user asked for; the fields are the options of the command line."""

    command: str
    checkpoint: Path
    output: Path | None
    max_shard_size: str | None
    card: bool
    options: Mapping[str, Any]
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    recipe_files: tuple[Path, ...]
    arch: str | None
    arch_args: str | None
    device: str
    dtype: str | None
    dry_run: bool
    force: bool
    report: Path | None
    as_json: bool
    verbose: int
    quiet: bool


def run_conversion(request: Request) -> int:
    """Convert or inspect a checkpoint; returns the exit code.

    Raises:
        FlashBiasError: as `convert_checkpoint`; where there is a plan, the table was shown and the
            report written, and the error carries the plan as JSON in `plan`.
    """
    options = DecomposeOptions(**request.options)
    if request.max_shard_size is not None:
        shard_bytes(request.max_shard_size)  # refused before torch is imported
    arch_args = json_object(request.arch_args)
    _check_report(request)
    output = Output(request.as_json, request.quiet, request.verbose)
    started = time.perf_counter()
    plans: list[Plan] = []
    try:
        done = _convert(request, options, arch_args, output, plans.append)
    except FlashBiasError as error:
        if plans:
            _tell_failure(request, output, plans[0], error)
        raise
    _tell(request, output, done, time.perf_counter() - started)
    _tell_failed_sites(request, done.plan)
    return _exit_code(done.plan)


def _convert(
    request: Request,
    options: DecomposeOptions,
    arch_args: dict[str, Any],
    output: Output,
    on_plan: Callable[[Plan], None],
) -> Conversion:
    # nothing is ever downloaded, and one bar is enough; set before the libraries read it
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # modules of the working directory can be named in --arch, but must not hide installed ones
    if request.arch is not None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    import torch

    from ..checkpoint import convert_checkpoint

    with output.progress("reading", "decomposing") as progress:
        return convert_checkpoint(
            request.checkpoint,
            request.output,
            options=options,
            include=request.include,
            exclude=request.exclude,
            recipes=load_recipes(request.recipe_files),
            arch=request.arch,
            arch_args=arch_args,
            device=torch_device(request.device),
            dtype=None if request.dtype is None else getattr(torch, request.dtype),
            dry_run=request.dry_run,
            force=request.force,
            max_shard_size=request.max_shard_size,
            card=request.card,
            progress=progress,
            on_plan=on_plan,
        )


def _check_report(request: Request) -> None:
    """Raise UsageError if the report would replace something that is not a report."""
    if request.report is None:
        return
    from ..checkpoint.outputs import is_folder, output_path, plan_path

    report, source = request.report.resolve(), request.checkpoint.resolve()
    sharded = request.max_shard_size is not None
    output = output_path(request.checkpoint, request.output, sharded=sharded).resolve()
    if report.is_dir() or (report.exists() and not report.is_file()):
        raise UsageError(f"the report {request.report} is not a file", _OTHER_REPORT)
    if not report.parent.is_dir():
        raise UsageError(f"the folder {report.parent} does not exist")
    if report == source or (source.exists() and report.exists() and report.samefile(source)):
        raise UsageError("the report would overwrite the checkpoint", _OTHER_REPORT)
    if source.is_dir() and report.is_relative_to(source):
        raise UsageError(f"the report would change the input {source}", _OTHER_REPORT)
    if report in (output, plan_path(output)) or (
        (sharded or is_folder(request.checkpoint)) and report.is_relative_to(output)
    ):
        raise UsageError(f"the report would overwrite the output {output}", _OTHER_REPORT)
    if report.name == "config.json" or report.suffix in _WEIGHTS:
        raise UsageError(f"{report.name} is no name for a report", _OTHER_REPORT)
    if report.exists() and not request.force:
        raise UsageError(f"the report {request.report} exists", _OTHER_REPORT)


def _tell(request: Request, output: Output, done: Conversion, seconds: float) -> None:
    from .tables import notes, reasons, site_table, summary

    def data() -> dict[str, Any]:
        return _data(request, done, seconds)

    for note in done.notes:
        output.note(f"note: {note}")
    output.result(
        data,
        f"{done.source}: {done.architecture}{_origin(done)}",
        site_table(done.plan, output.width),
        *(reasons(done.plan) if request.verbose else ()),
        *notes(done.plan),
        summary(done.plan, dry_run=request.dry_run),
        *_how_to_go_on(request, done),
    )
    _write_report(request, data)


def _tell_failure(request: Request, output: Output, plan: Plan, error: FlashBiasError) -> None:
    """Show a plan that came to nothing; the error itself is told by the caller."""
    from .tables import notes, reasons, site_table

    if not request.as_json:
        why = reasons(plan) if request.verbose else ()
        output.result(dict, site_table(plan, output.width), *why, *notes(plan))
    error.plan = plan.to_json()  # type: ignore[attr-defined]
    _write_report(request, lambda: {"error": str(error), "plan": plan.to_json()})


def _tell_failed_sites(request: Request, plan: Plan) -> None:
    failed = plan.with_status("failed")
    if not failed:
        return
    stayed = "would stay" if request.dry_run else "stayed"
    which = "; ".join(f"{site.name}: {site.reason}" for site in failed[:3])
    more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
    count = f"{len(failed)} of {len(plan.sites)} sites failed"
    print_error(f"{count} and {stayed} as they were: {which}{more}")


def _origin(done: Conversion) -> str:
    known = done.architecture.origin
    return "" if known == "the caller" else f" (from {known})"


def _how_to_go_on(request: Request, done: Conversion) -> list[str]:
    if done.output is None:
        return [f"nothing was written; to convert: flashbias-convert {_quoted(request.checkpoint)}"]
    arch = ", arch=..." if done.architecture.library == "caller" else ""
    if done.architecture.factory is not None:
        arch = f", arch={done.architecture.name.rpartition(':')[2]}"
    return [
        f"wrote {done.output} ({_megabytes(done.output)}) and {done.plan_file}",
        "to load it:",
        "    from flashbias_convert import load_model",
        f'    model = load_model("{done.output}"{arch})',
    ]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _megabytes(path: Path) -> str:
    files = path.iterdir() if path.is_dir() else [path]
    return f"{sum(f.stat().st_size for f in files) / 1e6:.1f} MB"


def _data(request: Request, done: Conversion, seconds: float) -> dict[str, Any]:
    return {
        "command": request.command,
        "dry_run": request.dry_run,
        "input": str(done.source),
        "output": None if done.output is None else str(done.output),
        "plan_file": None if done.plan_file is None else str(done.plan_file),
        "architecture": str(done.architecture),
        "notes": list(done.notes),
        "counts": done.plan.counts(),
        "seconds": round(seconds, 3),
        "exit_code": int(_exit_code(done.plan)),
        "plan": done.plan.to_json(),
    }


def _write_report(request: Request, data: Callable[[], Mapping[str, Any]]) -> None:
    if request.report is None:
        return
    from ..checkpoint.staging import Staging

    try:
        with Staging(request.force) as staging:
            temporary = staging.add(request.report.resolve())
            temporary.write_text(json.dumps(data(), indent=2) + "\n", encoding="utf-8")
            staging.commit()
    except OSError as error:
        message = f"the report {request.report} cannot be written: {error.strerror}"
        raise UsageError(message) from error


def _exit_code(plan: Plan) -> ExitCode:
    return ExitCode.PARTLY if plan.with_status("failed") else ExitCode.DONE
