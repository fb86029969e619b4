"""What `convert` and `inspect` say about what they did."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FlashBiasError
from .exit_codes import ExitCode
from .fitting import Fitting
from .output import Output, print_error
from .reports import write_report

if TYPE_CHECKING:  # these import torch, which takes seconds: not before the options are known
    from ..checkpoint import Conversion
    from ..plan import Plan
    from ..verification import Verification
    from .conversion import Request
    from .pictures import Pictures


def tell(
    request: Request,
    output: Output,
    done: Conversion,
    seconds: float,
    verification: Verification | None = None,
    pictures: Pictures | None = None,
) -> None:
    """Show what was done, and write the report.

    Args:
        request: what was asked for.
        output: where to.
        done: what was done.
        seconds: how long it took.
        verification: of the file that was written, if one was asked for.
        pictures: what was drawn.
    """
    from .tables import notes, reasons, site_table, summary

    def data() -> dict[str, Any]:
        drawn = {} if pictures is None else pictures.to_json()
        return _data(request, done, seconds, verification) | drawn

    for note in done.notes:
        output.note(f"note: {note}")
    output.result(
        data,
        f"{done.source}: {done.architecture}{_origin(done)}",
        site_table(done.plan, output.width),
        *(reasons(done.plan) if request.speaking.verbose else ()),
        *notes(done.plan),
        summary(done.plan, dry_run=request.dry_run),
        *_verified(verification, output),
        *(pictures.lines() if pictures is not None else ()),
        *_how_to_go_on(request, done),
    )
    write_report(request.report, data, request.force)


def tell_failure(request: Request, output: Output, plan: Plan, error: FlashBiasError) -> None:
    """Show a plan that came to nothing; the error itself is told by the caller."""
    from .tables import notes, reasons, site_table

    found: Any = getattr(error, "verification", None)
    if not request.speaking.json:
        why = reasons(plan) if request.speaking.verbose else ()
        output.result(
            dict, site_table(plan, output.width), *why, *notes(plan), *_verified(found, output)
        )
    told: dict[str, Any] = {"plan": plan.to_json()}
    if found is not None:
        told["verification"] = found.to_json()
    error.told = told  # type: ignore[attr-defined]
    write_report(request.report, lambda: {"error": str(error), **told}, request.force)


def _verified(found: Verification | None, output: Output) -> list[Any]:
    if found is None:
        return []
    from .verdicts import verification_lines

    return verification_lines(found, output.width)


def tell_failed_sites(request: Request, plan: Plan) -> None:
    """One line on stderr, if sites failed."""
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
    from ..checkpoint.bare import TENSORS_ALONE

    if done.architecture == TENSORS_ALONE:
        return ["nothing was written; to convert it, say what it is: --arch"]
    if done.output is None:
        if request.command == "convert":
            return ["nothing was written; to convert, leave out --dry-run"]
        command = f"flashbias-convert {_quoted(request.checkpoint)}"
        return [f"nothing was written; to convert: {command}, with the same options"]
    return [
        f"wrote {done.output} ({_megabytes(done.output)}) and {done.plan_file}",
        "to load it:",
        *(f"    {line}" for line in _loading(request, done)),
    ]


def _loading(request: Request, done: Conversion) -> list[str]:
    """Python that loads what was written: with the function and the recipes that it took."""
    names, lines, more = ["load_model"], [], ""
    if done.architecture.factory is not None:
        module, _, function = done.architecture.name.rpartition(":")
        lines.append(f"from {module} import {function}")
        if given := ", ".join(f"{k}={v!r}" for k, v in done.architecture.args.items()):
            lines.insert(0, "from functools import partial")
            function = f"partial({function}, {given})"
        more += f", arch={function}"
    elif done.architecture.library == "caller":
        more += ", arch=..."
    if request.recipe_files:
        names.insert(0, "load_recipe_file")
        given = ", ".join(f'load_recipe_file("{path}")' for path in request.recipe_files)
        more += f", recipes=[{given}]"
    return [
        f"from flashbias_convert import {', '.join(names)}",
        *lines,
        f'model = load_model("{done.output}"{more})',
    ]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _megabytes(path: Path) -> str:
    files = path.iterdir() if path.is_dir() else [path]
    return f"{sum(f.stat().st_size for f in files) / 1e6:.1f} MB"


def _data(
    request: Request, done: Conversion, seconds: float, verification: Verification | None
) -> dict[str, Any]:
    data = {
        "command": request.command,
        "dry_run": request.dry_run,
        "input": str(done.source),
        "output": None if done.output is None else str(done.output),
        "plan_file": None if done.plan_file is None else str(done.plan_file),
        "architecture": str(done.architecture),
        "notes": list(done.notes),
        "held_in_memory": None if done.held is None else dataclasses.asdict(done.held),
        "counts": done.plan.counts(),
        "seconds": round(seconds, 3),
        "exit_code": int(exit_code(request, done.plan)),
        "plan": done.plan.to_json(),
    }
    if verification is not None:
        data["verification"] = verification.to_json()
    return data


def exit_code(request: Request, plan: Plan) -> ExitCode:
    """DONE, or PARTLY where sites failed or missed what a fit was asked for."""
    missed = isinstance(request.calibrating, Fitting) and request.calibrating.missed
    return ExitCode.PARTLY if missed or plan.with_status("failed") else ExitCode.DONE
