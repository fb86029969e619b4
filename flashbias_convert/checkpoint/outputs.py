"""What the output is called, and what may be overwritten."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError
from .files import INDEX_SUFFIX
from .publication import require_absent, require_no_folder

WEIGHTS_NAME = "model.safetensors"
_SUFFIX = ".safetensors"


def plan_path(weights: Path) -> Path:
    """The sidecar of a converted file: ``x.flashbias.safetensors`` -> ``x.flashbias.plan.json``."""
    return weights.with_suffix(".plan.json")


def is_folder(source: Path) -> bool:
    """Whether the input is a folder (or the index in one), so that the output is one, too."""
    return source.is_dir() or source.name.endswith(INDEX_SUFFIX)


def output_path(source: Path, output: Path | None, *, sharded: bool = False) -> Path:
    """Where to write the conversion of `source`.

    Args:
        source: the input, a file, an index or a folder.
        output: what the user asked for: a file ``*.safetensors``, a folder to write into, or None
            for ``NAME.flashbias.safetensors`` (a folder ``NAME.flashbias``) beside the input.
        sharded: the output is a folder, whatever the input is.

    Raises:
        UsageError: a name of another kind.
    """
    default = default_output(source, sharded=sharded)
    if output is None:
        return default
    if output.suffix == _SUFFIX:
        if sharded:
            raise UsageError(
                f"shards go into a folder, and {output} is a file", "leave out its .safetensors"
            )
        return output
    if is_folder(source):
        return output
    if output.is_dir() and not (sharded and _is_ours(output)):
        return output / default.name
    if sharded:
        return output
    raise UsageError(f"the output {output} must end in {_SUFFIX}")


def default_output(source: Path, *, sharded: bool = False) -> Path:
    """``NAME.flashbias.safetensors`` beside a file, ``NAME.flashbias`` beside a folder."""
    if not is_folder(source):
        return source.with_name(f"{source.stem}.flashbias{'' if sharded else _SUFFIX}")
    folder = source if source.is_dir() else source.parent
    if folder.name in ("", ".."):  # "." has no name to extend
        folder = folder.resolve()
    return folder.with_name(f"{folder.name}.flashbias")


def check_output(output: Path, source: Path, force: bool) -> None:
    """Raise UsageError if `output` (a file, or a folder to be made) must not be written.

    An input is never overwritten, and a folder is replaced only where an earlier conversion made
    it, whatever `force` says.
    """
    if same_file(output, source) or (source.is_dir() and same_file(output.parent, source)):
        raise UsageError(f"the output {output} would change the input", "choose another --output")
    if output.suffix == _SUFFIX:
        check_file(output, force)
    else:
        check_folder(output, force)


def check_folder(output: Path, force: bool) -> None:
    """Raise UsageError if the folder `output` must not be made or replaced."""
    require_absent(output, force)
    if os.path.lexists(output) and not _is_ours(output):
        raise UsageError(
            f"{output} was made by no conversion, so it is not replaced",
            "choose another --output",
        )


def check_file(output: Path, force: bool) -> None:
    """Raise UsageError if the file `output` or its sidecar must not be written."""
    for path in (output, plan_path(output)):
        require_absent(path, force)
        require_no_folder(path)


def _is_ours(folder: Path) -> bool:
    return plan_path(folder / WEIGHTS_NAME).is_file()


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths lead to one file or folder that exists."""
    return a.exists() and b.exists() and a.samefile(b)
