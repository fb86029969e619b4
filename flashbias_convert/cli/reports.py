"""Reports as JSON files: they never take the place of anything else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError

#: never the name of a report: a slip must not cost a checkpoint
_WEIGHTS = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".tar", ".mdlus", ".onnx")


def check_report(
    report: Path | None,
    *,
    sources: Iterable[Path],
    output: Path | None = None,
    force: bool,
    option: str = "--report",
) -> None:
    """Raise UsageError if the report would replace something that is not a report.

    Args:
        report: where it will be written, or None.
        sources: files and folders that are read; nothing in them may change.
        output: what the command writes, or None.
        force: replace an existing report.
        option: that names the report.
    """
    try:
        _check(report, sources, output, force)
    except UsageError as error:
        raise UsageError(error.args[0], f"choose another name for {option}") from error


def _check(report: Path | None, sources: Iterable[Path], output: Path | None, force: bool) -> None:
    if report is None:
        return
    resolved = report.resolve()
    if resolved.is_dir() or (resolved.exists() and not resolved.is_file()):
        raise UsageError(f"the report {report} is not a file")
    if not resolved.parent.is_dir():
        raise UsageError(f"the folder {resolved.parent} does not exist")
    for source in sources:
        _check_source(resolved, source.resolve())
    if output is not None:
        _check_output(resolved, output)
    if resolved.name == "config.json" or resolved.suffix in _WEIGHTS:
        raise UsageError(f"{resolved.name} is no name for a report")
    if resolved.exists() and not force:
        raise UsageError(f"the report {report} exists")


def _check_source(report: Path, source: Path) -> None:
    if report == source or (source.exists() and report.exists() and report.samefile(source)):
        raise UsageError("the report would overwrite the checkpoint")
    if source.is_dir() and report.is_relative_to(source):
        raise UsageError(f"the report would change the input {source}")


def _check_output(report: Path, output: Path) -> None:
    from ..checkpoint.outputs import plan_path

    resolved = output.resolve()
    is_file = resolved.suffix == ".safetensors"
    taken = (
        report in (resolved, plan_path(resolved)) if is_file else report.is_relative_to(resolved)
    )
    if taken:
        raise UsageError(f"the report would overwrite the output {output}")


def write_report(report: Path | None, data: Callable[[], Mapping[str, Any]], force: bool) -> None:
    """Write `data()` as JSON, complete or not at all; nothing where no report was asked for.

    Raises:
        UsageError: it cannot be written.
    """
    if report is None:
        return
    text = json.dumps(data(), indent=2) + "\n"
    write_file(report, lambda path: path.write_text(text, encoding="utf-8"), force)


def write_file(path: Path, write: Callable[[Path], object], force: bool) -> None:
    """Let `write` write a file, complete or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    from ..checkpoint.staging import Staging

    try:
        with Staging(force) as staging:
            write(staging.add(path.resolve()))
            staging.commit()
    except OSError as error:
        raise UsageError(f"the report {path} cannot be written: {error.strerror}") from error
